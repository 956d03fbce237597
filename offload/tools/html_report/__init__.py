"""The page of a run: one self-contained HTML file, made from what `run_file` reads.

`timeline` prepares what the script draws, `page` fills the templates with it and with the numbers
of the run, and puts `page.css` and the scripts beside. `picture` is the same as a PNG. Pure
functions: the caller writes the files. Needs no torch. Names in a run file are untrusted.
"""

from __future__ import annotations

from offload.tools.html_report.page import make_page
from offload.tools.html_report.picture import make_picture
from offload.tools.html_report.timeline import to_perfetto

__all__ = ["make_page", "make_picture", "to_perfetto"]
