"""The picture people look at: a self-contained HTML page and a PNG of one study.

`values` decides what is shown, `html` puts it into the page (page.html, page.css, page.js beside
this file), `picture` draws the same scatter with matplotlib. Nothing here reads a database.
"""

from archsearch.report.html import html_report
from archsearch.report.picture import png_report
from archsearch.report.values import hypervolume_history

__all__ = ["html_report", "hypervolume_history", "png_report"]
