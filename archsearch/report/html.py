"""The report as one HTML page: values as JSON, style and script inlined, nothing loaded.

A content security policy in the page forbids every request, so it is the same page from a mail
attachment, a file, or a sandboxed frame of MLflow.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from archsearch.records import StudyRecord, TrialRecord
from archsearch.report.values import page_values


def html_report(study: StudyRecord, trials: Sequence[TrialRecord]) -> str:
    """Return the whole page as text, in UTF-8 when written."""
    page = _part("page.html")
    parts = {
        "{{title}}": escape(f"{study.name} - archsearch"),
        "{{style}}": _part("page.css"),
        "{{values}}": _embedded(json.dumps(page_values(study, trials), allow_nan=False)),
        "{{script}}": _part("charts.js") + _part("page.js"),
    }
    # One pass over the template, so that nothing inside a value is ever taken for a slot.
    for slot in parts:
        assert page.count(slot) == 1, slot
    pieces = [page]
    for slot, text in parts.items():
        head, tail = pieces.pop().split(slot)
        pieces += [head, text, tail]
    return "".join(pieces)


def _part(name: str) -> str:
    return files("archsearch.report").joinpath(name).read_text(encoding="utf-8")


def _embedded(text: str) -> str:
    """Make JSON safe inside a script element: no `<` can end it, `&` and `>` cannot confuse."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
