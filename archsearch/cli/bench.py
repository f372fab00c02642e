"""Measurements, with peers beside: `archsearch bench ...`."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from archsearch.cli.app import AsJson, app, print_json
from archsearch.errors import UsageError
from archsearch.spec import Execution

bench = typer.Typer(
    no_args_is_help=True, help="Measurements of what this package does, with peers beside."
)
app.add_typer(bench, name="bench")


@bench.callback()
def _group() -> None:
    pass


@bench.command()
def trials(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="Study file.")],
    start: Annotated[
        str, typer.Option(help="Which architecture: smallest, middle, largest or a published one.")
    ] = "middle",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs that the population trains.")] = 4,
    plain_epochs: Annotated[int, typer.Option(min=1, help="Epochs of the plain model.")] = 2,
    execution: Annotated[
        str | None,
        typer.Option(help="eager, captured or compiled; as a trial would if left out."),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option(help="Also time training that repeats bit by bit on a GPU.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Trained runs an hour: a population, and one plain PyTorch model after the other."""
    from archsearch.bench_trials import bench_text, bench_values
    from archsearch.study_file import load_study

    ways: dict[str | None, Execution | None] = {
        None: None,
        "eager": "eager",
        "captured": "captured",
        "compiled": "compiled",
    }
    if execution not in ways:
        raise UsageError(f"--execution is {execution}; accepted: eager, captured, compiled")
    given = (load_study(study), start, epochs, plain_epochs, ways[execution], deterministic)
    values = bench_values(*given)
    print_json(values) if as_json else typer.echo(bench_text(values))


@bench.command()
def kernels(
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; cuda where there is one if left out.")
    ] = None,
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Our kernels and installed peers against the floor, with the error of each beside its time."""
    import torch

    from archsearch.bench_kernels import bench_text, bench_values

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cuda", "cpu"):
        raise UsageError(f"--device is {chosen}; accepted: cuda, cpu")
    progress = partial(typer.echo, err=True)
    values = bench_values(chosen, only, progress)
    if out is not None:
        out.write_text(json.dumps(values, indent=1) + "\n")
    print_json(values) if as_json else typer.echo(bench_text(values))
