"""Commands that run a study, and those on a study that runs or is to go on."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from archsearch.cli.app import Address, AsJson, Mlflow, Storage, StudyArgument, app, print_json
from archsearch.errors import FailureClass, UsageError


@app.command()
def run(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="Study file.")],
    address: Address = None,
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
    from archsearch.study_file import load_study, plugin_files

    spec = load_study(study)
    budget = {"trials": trials, "time_s": _seconds("--time", time)}
    given = {name: value for name, value in budget.items() if value is not None}
    spec = spec.model_copy(
        update={
            "tracking": _places(spec.tracking, storage, mlflow),
            "search": spec.search.model_copy(update=given),
        }
    )
    if dry_run:
        from archsearch.preview import preview_text, preview_values

        print_json(preview_values(spec)) if as_json else typer.echo(preview_text(spec))
        return
    from archsearch.launch import launch

    raise typer.Exit(launch(spec, plugin_files(spec), address, sys.stdout, as_json))


def _places(tracking: Any, storage: str | None, mlflow: str | None) -> Any:
    """Where results go, with those places that were given; only MLflow may be none."""
    given: dict[str, str | None] = {} if storage is None else {"storage": storage}
    if mlflow is not None:
        given["mlflow"] = None if mlflow == "none" else mlflow
    return tracking.model_copy(update=given)


def _seconds(option: str, time: str | None) -> float | None:
    from archsearch.units import parse_duration

    try:
        return parse_duration(time) if time is not None else None
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


@app.command()
def resume(
    study: StudyArgument = None,
    address: Address = None,
    storage: Storage = None,
    mlflow: Mlflow = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a stored study as it is stored, or with one that is paused. Needs no file."""
    from archsearch.launch import launch
    from archsearch.locate import locate, opened
    from archsearch.registry import add_plugin_source
    from archsearch.store import control

    place = locate(study, storage)
    with opened(place) as (store, name):
        asked = control.ask(store, name, None)
        record = store.study(name)
    if asked.holder is not None:
        paused = asked.before is not None
        typer.echo(f"study '{name}' {'goes on' if paused else 'is running'}: {asked.holder}")
        return
    for plugin in record.plugins:
        add_plugin_source(plugin.name, plugin.source)
    places = _places(record.spec.tracking, place.storage, mlflow)
    spec = record.spec.model_copy(update={"tracking": places})
    raise typer.Exit(launch(spec, record.plugins, address, sys.stdout, as_json))


@app.command()
def pause(study: StudyArgument = None, storage: Storage = None) -> None:
    """Let a running study finish the trials it has begun and then wait for `resume`."""
    from archsearch.locate import locate, opened
    from archsearch.records import Request
    from archsearch.store import control

    with opened(locate(study, storage)) as (store, name):
        asked = control.ask(store, name, Request.PAUSE)
    if asked.holder is None:
        typer.echo(f"study '{name}' is not running")
    else:
        typer.echo(f"study '{name}' pauses ({asked.holder}); go on with: archsearch resume {name}")


@app.command()
def stop(study: StudyArgument = None, storage: Storage = None) -> None:
    """Stop a running study as Ctrl-C does, from anywhere, and wait until it has stopped."""
    from archsearch.locate import locate, opened
    from archsearch.records import Request
    from archsearch.store import control

    with opened(locate(study, storage)) as (store, name):
        asked = control.ask(store, name, Request.STOP)
        if asked.holder is None:
            typer.echo(f"study '{name}' is not running")
            return
        control.wait_until_free(store, name)
    typer.echo(f"study '{name}' has stopped; go on with: archsearch resume {name}")


@app.command()
def retry(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Study file or stored name.")],
    trials: Annotated[
        list[int] | None, typer.Argument(metavar="[TRIAL]...", help="Numbers; all if left out.")
    ] = None,
    failure: Annotated[
        FailureClass | None, typer.Option("--class", help="Only trials that failed like this.")
    ] = None,
    storage: Storage = None,
) -> None:
    """Have failed trials evaluated again by the next `run` or `resume`."""
    from archsearch.locate import locate, opened
    from archsearch.store import control

    with opened(locate(study, storage)) as (store, name):
        again = control.retry(store, name, failure, trials or [])
    if not again:
        how = f" ({failure})" if failure is not None else ""
        typer.echo(f"study '{name}' has no failed trial{how}")
        return
    numbers = ", ".join(map(str, again))
    typer.echo(f"trials {numbers} are evaluated again by: archsearch resume {name}")


@app.command()
def budget(
    study: StudyArgument = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Distinct architectures.")] = None,
    time: Annotated[str | None, typer.Option(help="Wall clock, such as 2h, or none.")] = None,
    device_time: Annotated[
        str | None, typer.Option(help="Time of all trials times GPUs (or CPU cores), or none.")
    ] = None,
    failures: Annotated[
        str | None, typer.Option(help="Failed trials that end the study, or none.")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Trials at once, or none; from the next run on.")
    ] = None,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """What a study may spend and has spent; with options, change it, also while it runs."""
    from archsearch.locate import locate, opened
    from archsearch.store import control
    from archsearch.tables import budget_text, budget_values

    search = _given(
        trials=(trials, trials),
        time_s=(time, _or_none("--time", time)),
        device_time_s=(device_time, _or_none("--device-time", device_time)),
        failures=(failures, _count("--failures", failures)),
    )
    resources = _given(parallel=(parallel, _count("--parallel", parallel)))
    with opened(locate(study, storage)) as (store, name):
        if search or resources:
            control.set_budget(store, name, search, resources)
        values = budget_values(store.study(name), store.trials(name))
    print_json(values) if as_json else typer.echo(budget_text(values))


def _given(**fields: tuple[Any, Any]) -> dict[str, Any]:
    """Values of those fields whose option was given."""
    return {name: value for name, (option, value) in fields.items() if option is not None}


def _or_none(option: str, time: str | None) -> float | None:
    return None if time == "none" else _seconds(option, time)


def _count(option: str, text: str | None) -> int | None:
    if text is None or text == "none":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"{option}: found '{text}'; accepted: a whole number above 0, or none")
    return int(text)
