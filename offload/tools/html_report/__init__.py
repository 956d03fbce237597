"""The page of a run: one self-contained HTML file, made from what `run_file` reads.

`summary`, `by_unit` and `memory` compute the figures, `drawing` the data of the script, `sections`
and `comparison` write HTML, `document` assembles it with `page.css` and the scripts. `picture` is
the same as a PNG, `chrome` a timeline for Perfetto. Pure functions: the caller writes the files.
Needs no torch. Names in a run file are untrusted: `markup` escapes all text.
"""

from __future__ import annotations

from offload.tools.html_report.chrome import to_perfetto
from offload.tools.html_report.document import make_page
from offload.tools.html_report.picture import make_picture
from offload.tools.html_report.summary import Summary, summarize

__all__ = ["Summary", "make_page", "make_picture", "summarize", "to_perfetto"]
