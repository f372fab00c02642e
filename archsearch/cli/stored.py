"""Commands on what is stored: where studies stand, the front, a trial, models, MLflow."""

from pathlib import Path
from typing import Annotated, Any

import typer

from archsearch.cli.app import AsJson, Mlflow, Storage, StudyArgument, StudyOption, app, print_json
from archsearch.errors import ServiceError, UsageError


@app.command()
def status(study: StudyArgument = None, storage: Storage = None, as_json: AsJson = False) -> None:
    """Where each stored study stands, or the one named."""
    from archsearch.locate import locate
    from archsearch.store import Store
    from archsearch.tables import status_text, status_values

    place = locate(study, storage)
    with Store(place.storage) as store:
        names = [place.study] if place.study else store.studies()
        rows = [status_values(store.study(name), store.trials(name)) for name in names]
    print_json(rows) if as_json else typer.echo(status_text(rows))


@app.command()
def front(
    study: StudyArgument = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the picture to this file: .png or .html.")
    ] = None,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """The Pareto front of a study: table, JSON, picture or interactive report."""
    from archsearch.locate import locate, opened
    from archsearch.tables import front_text, front_values

    with opened(locate(study, storage)) as (store, name):
        record, trials = store.study(name), store.trials(name)
    if plot is not None:
        _plot(plot, record, trials)
    print_json(front_values(record, trials)) if as_json else typer.echo(front_text(record, trials))


def _plot(path: Path, record: Any, trials: Any) -> None:
    from archsearch.report import write_report

    write_report(path, record, trials)


@app.command()
def show(
    what: Annotated[str, typer.Argument(metavar="TRIAL|arch", help="A trial's number, or arch.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A published architecture; none: all.")
    ] = None,
    study: StudyOption = None,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Everything that is stored of one trial, or what a published architecture costs."""
    if what == "arch":
        _show_architecture(name, as_json)
    elif what.isdecimal() and name is None:
        _show_trial(int(what), study, storage, as_json)
    else:
        found = what if name is None else f"{what} {name}"
        raise UsageError(f"found '{found}'; accepted: the number of a trial, or 'arch' and a name")


def _show_architecture(name: str | None, as_json: bool) -> None:
    from archsearch import catalogue

    if name is None:
        values, text = catalogue.architectures_values, catalogue.architectures_text
        print_json(values()) if as_json else typer.echo(text())
    elif as_json:
        print_json(catalogue.architecture_values(name))
    else:
        typer.echo(catalogue.architecture_text(name))


def _show_trial(trial: int, study: str | None, storage: str | None, as_json: bool) -> None:
    from archsearch.front import ranked
    from archsearch.locate import locate, opened
    from archsearch.tables import trial_text, trial_values

    with opened(locate(study, storage)) as (store, name):
        record, one = store.study(name), store.trial(name, trial)
        ranks = {ranked.number: rank for ranked, rank in ranked(record, store.trials(name))}
    rank = ranks.get(trial)
    print_json(trial_values(record, one, rank)) if as_json else typer.echo(
        trial_text(record, one, rank)
    )


@app.command()
def export(
    trial: Annotated[int, typer.Argument(metavar="TRIAL", help="Number of the trial.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    study: StudyOption = None,
    storage: Storage = None,
) -> None:
    """Take a trained model home: weights, architecture, a script that generates tokens."""
    from archsearch.export import export_trial
    from archsearch.locate import locate, opened

    with opened(locate(study, storage)) as (store, name):
        typer.echo(export_trial(store, name, trial, folder))


@app.command()
def sync(study: StudyArgument = None, storage: Storage = None, mlflow: Mlflow = None) -> None:
    """Rebuild a study in MLflow from the database. Doing it again changes nothing."""
    from archsearch.locate import locate, opened
    from archsearch.tracking import sync as synchronise

    with opened(locate(study, storage)) as (store, name):
        uri = _tracking_uri(mlflow, store.study(name).spec)
        count = synchronise(store, name, uri)
    typer.echo(f"{uri} shows {count} trials of '{name}'")


def _tracking_uri(given: str | None, spec: Any) -> str:
    uri = given or spec.tracking.mlflow
    if uri is None or uri == "none":
        raise UsageError(f"study '{spec.study}' is not tracked in MLflow; name one with --mlflow")
    return str(uri)


@app.command()
def ui(
    study: StudyArgument = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 5000,
    storage: Storage = None,
    mlflow: Mlflow = None,
) -> None:
    """Open MLflow on a study and say where its report is. Ctrl-C ends it."""
    from archsearch.browse import is_server, user_interface, wait_for_interrupt
    from archsearch.locate import locate, opened
    from archsearch.tracking import summary_address

    with opened(locate(study, storage)) as (store, name):
        uri = _tracking_uri(mlflow, store.study(name).spec)
    path = summary_address(uri, name)
    if path is None:
        raise ServiceError(f"{uri} does not show '{name}'; publish it with: archsearch sync {name}")
    if not is_server(uri):
        typer.echo("Starting MLflow's server...", err=True)
    with user_interface(uri, port) as (address, is_ours):
        typer.echo(f"study '{name}': {address}{path}")
        if is_ours:
            typer.echo("Ctrl-C ends the server.")
            wait_for_interrupt()
