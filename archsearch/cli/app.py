"""The frame of the command line: its help, exit codes, shared options, and where output goes."""

import io
import json
import os
import sys
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from archsearch import __version__
from archsearch.errors import (
    EXIT_INTERRUPTED,
    EXIT_OUTPUT_CLOSED,
    ArchsearchError,
    ServiceError,
)

EPILOG = (
    "Exit codes: 0 done; 1 a bug; 2 the input is wrong; 3 the study is held by another "
    "coordinator or is stored with another search space; 4 a service cannot be reached or cannot "
    "do what was asked; 5 the study ended without a complete trial; 130 stopped by Ctrl-C or on "
    "request; 141 nobody reads the output any more."
)


class _OutputError(OSError):
    """Standard output cannot be written. Its cause says why; without a number of its own."""


class _Output(io.FileIO):
    """Standard output that can be told from other files when it fails."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _OutputError(str(error)) from error


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
Address = Annotated[
    str | None,
    typer.Option(help="Running Ray cluster: auto or HOST:PORT; this machine if left out."),
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
    if sys.stdout is None:  # it was closed before Python began
        app()
    number = sys.stdout.fileno()
    sys.stdout = _watched(sys.stdout)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except _OutputError as error:
        # What is left in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        if isinstance(error.__cause__, BrokenPipeError):
            sys.exit(EXIT_OUTPUT_CLOSED)
        sys.stderr.write(f"archsearch: standard output cannot be written: {error}\n")
        sys.exit(ServiceError.exit_code)


def _watched(output: TextIO) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(output.fileno(), "w", closefd=False)),
        encoding=output.encoding,
        errors=output.errors,
        line_buffering=output.isatty(),
    )


def print_json(values: object) -> None:
    """Print values as indented JSON."""
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
