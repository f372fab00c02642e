"""Commands on what is installed: mixers, the soundness of it all, the schema of study files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from archsearch.cli.app import AsJson, Mlflow, Storage, app, print_json
from archsearch.errors import ServiceError, UsageError


@app.command()
def mixers(as_json: AsJson = False) -> None:
    """The mixers a study can use, with their fields and ranges."""
    from archsearch.catalogue import mixers_text, mixers_values

    print_json(mixers_values()) if as_json else typer.echo(mixers_text())


@app.command()
def check(storage: Storage = None, mlflow: Mlflow = None, as_json: AsJson = False) -> None:
    """Is the installation sound? Versions, devices, kernels, database, MLflow, disk."""
    from archsearch.checks import check_line, checks_values, run_checks
    from archsearch.spec import TrackingSpec

    usual = TrackingSpec()
    tracking = None if mlflow == "none" else mlflow or usual.mlflow
    done = []
    for one in run_checks(storage or usual.storage, tracking):
        done.append(one)
        if not as_json:
            typer.echo(check_line(one))
    if as_json:
        print_json(checks_values(done))
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
