"""The picture people look at: a self-contained HTML page and a PNG of one study.

`values` decides what is shown, `html` puts it into the page (page.html, page.css, page.js beside
this file), `picture` draws the same scatter with matplotlib. Nothing here reads a database.
"""

from collections.abc import Sequence
from pathlib import Path

from archsearch.errors import UsageError
from archsearch.records import StudyRecord, TrialRecord
from archsearch.report.html import html_report
from archsearch.report.picture import png_report
from archsearch.report.values import hypervolume_history

__all__ = ["html_report", "hypervolume_history", "png_report", "write_report"]


def write_report(path: Path, study: StudyRecord, trials: Sequence[TrialRecord]) -> None:
    """Write the picture (`.png`) or the interactive page (`.html`), by the file's name.

    Raises UsageError for another ending, or a file that cannot be written.
    """
    ending = path.suffix.lower()
    if ending not in (".png", ".html"):
        raise UsageError(f"{path}: the name ends in {ending or 'nothing'}; accepted: .png, .html")
    content = png_report(study, trials) if ending == ".png" else html_report(study, trials).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
