"""The page of a run: one HTML file that needs nothing else, made from what `run_file` reads.

`summary`, `by_unit` and `memory` compute what is told, `drawing` what the script draws, `sections`
and `comparison` write it as HTML, `document` puts it together with `page.css` and `page.js`.
`picture` makes the same a PNG, `chrome` a timeline for Perfetto. Pure functions: who calls them
writes the files. Needs no torch. Names in a file are anybody's: all text passes `markup`.
"""

from __future__ import annotations

from offload.tools.html_report.chrome import to_perfetto
from offload.tools.html_report.document import make_page
from offload.tools.html_report.picture import make_picture
from offload.tools.html_report.summary import Summary, summarize

__all__ = ["Summary", "make_page", "make_picture", "summarize", "to_perfetto"]
