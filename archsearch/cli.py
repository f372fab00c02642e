"""The command line. Reads arguments, calls the module that does the work, prints what it returns.

Everything heavy is imported inside the command that needs it, so that `--help` is quick.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from archsearch import __version__
from archsearch.errors import EXIT_INTERRUPTED, ArchsearchError, ServiceError, UsageError

EPILOG = (
    "Exit codes: 0 done; 1 a bug; 2 the input is wrong; 3 the study is held by another "
    "coordinator or is stored with another search space; 4 a service cannot be reached or cannot "
    "do what was asked; 5 the study ended without a complete trial; 130 stopped by Ctrl-C."
)


class _Group(TyperGroup):
    """Turns errors meant for the user into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ArchsearchError as error:
            typer.echo(f"archsearch: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


app = typer.Typer(
    cls=_Group,
    help="Architecture search for language-model sequence mixers: recall, latency, state bytes.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

StudyArgument = Annotated[
    str | None,
    typer.Argument(metavar="STUDY", help="Study file or stored name; the only study if left out."),
]
StudyOption = Annotated[
    str | None,
    typer.Option("--study", help="Study file or stored name; the only study if left out."),
]
Storage = Annotated[
    str | None,
    typer.Option(
        envvar="ARCHSEARCH_STORAGE",
        help="Database URL; sqlite:///archsearch.db in this folder if nothing else is said.",
    ),
]
Mlflow = Annotated[
    str | None, typer.Option(help="MLflow tracking URI, or none; the study's own if left out.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point of the console script."""
    # MLflow would report its use to its makers; that is for the user to turn on.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    app()


def _print(values: object) -> None:
    typer.echo(json.dumps(values, indent=2))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"archsearch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="Study file.")],
    address: Annotated[
        str | None,
        typer.Option(help="Running Ray cluster: auto or HOST:PORT; this machine if left out."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Budget of architectures, over all runs.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Budget of wall clock over all runs, such as 30m.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be searched; write nothing.")
    ] = False,
    storage: Storage = None,
    mlflow: Mlflow = None,
    as_json: AsJson = False,
) -> None:
    """Run a study, or go on with it where it stopped. Ctrl-C stops cleanly."""
    from archsearch.study_file import load_study

    spec = load_study(study)
    spec = spec.model_copy(
        update={
            "tracking": _changed(spec.tracking, storage=storage, mlflow=mlflow),
            "search": _changed(spec.search, trials=trials, time_s=_seconds(time)),
        }
    )
    if dry_run:
        from archsearch.preview import preview_text, preview_values

        _print(preview_values(spec)) if as_json else typer.echo(preview_text(spec))
        return
    from archsearch.launch import launch

    raise typer.Exit(launch(spec, address, sys.stdout, as_json))


def _changed(part: Any, **options: Any) -> Any:
    """A part of a study with those settings that were given; `none` is no value."""
    given = {name: value for name, value in options.items() if value is not None}
    return part.model_copy(update={k: None if v == "none" else v for k, v in given.items()})


def _seconds(time: str | None) -> float | None:
    from archsearch.units import parse_duration

    try:
        return parse_duration(time) if time is not None else None
    except ValueError as error:
        raise UsageError(f"--time: {error}") from error


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
    _print(rows) if as_json else typer.echo(status_text(rows))


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
    _print(front_values(record, trials)) if as_json else typer.echo(front_text(record, trials))


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
        _print(values()) if as_json else typer.echo(text())
    elif as_json:
        _print(catalogue.architecture_values(name))
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
    _print(trial_values(record, one, rank)) if as_json else typer.echo(
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
def mixers(as_json: AsJson = False) -> None:
    """The mixers a study can use, with their fields and ranges."""
    from archsearch.catalogue import mixers_text, mixers_values

    _print(mixers_values()) if as_json else typer.echo(mixers_text())


@app.command()
def check(storage: Storage = None, mlflow: Mlflow = None, as_json: AsJson = False) -> None:
    """Is the installation sound? Versions, devices, kernels, database, MLflow, disk."""
    from archsearch.checks import check_line, checks_values, run_checks
    from archsearch.spec import TrackingSpec

    usual = TrackingSpec()
    done = []
    for one in run_checks(storage or usual.storage, mlflow or usual.mlflow):
        done.append(one)
        if not as_json:
            typer.echo(check_line(one))
    if as_json:
        _print(checks_values(done))
    failed = [one.name for one in done if not one.ok]
    if failed:
        raise ServiceError(f"{len(failed)} of {len(done)} checks failed: {', '.join(failed)}")


@app.command()
def schema(
    output: Annotated[
        Path | None, typer.Option(help="File to write; standard output else.")
    ] = None,
) -> None:
    """JSON Schema of study files, for editors."""
    from archsearch.study_file import study_schema

    text = json.dumps(study_schema(), indent=2)
    if output is None:
        typer.echo(text)
    else:
        try:
            output.write_text(text + "\n")
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}") from error


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
