# SPDX-License-Identifier: Apache-2.0
"""report.html: the executed notebook without its code, one file that needs no network."""

import html
import logging
from pathlib import Path

from atomic_lib.evidence.files import atomic_write
from atomic_lib.evidence.verify import NOTEBOOK, REPORT

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
h1, h2, h3 { line-height: 1.25; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .6rem 0; }
th, td { border: 1px solid #d0d0d0; padding: .2rem .6rem; text-align: left; vertical-align: top; }
pre { overflow-x: auto; background: #f6f6f6; padding: .5rem .7rem; font-size: 13px; }
.anchor-link, .prompt { display: none; }
.ansi-red-fg { color: #b22b31; } .ansi-green-fg { color: #00700a; }
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>
<body>
{body}
</body>
</html>
"""


def write_report(path: Path) -> Path:
    """Renders a run folder's notebook.ipynb as report.html beside it and returns its path.

    Code is left out; text, tables and figures stay, figures inside the file. Imports nbconvert.
    """
    import nbformat
    from nbconvert import HTMLExporter

    path = Path(path)
    exporter = HTMLExporter(template_name="basic", exclude_input=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    exporter.embed_images = True
    # It warns of every figure without an alternative text, on standard error.
    exporter.log = logging.getLogger("atomic_lib.report")
    exporter.log.setLevel(logging.ERROR)
    notebook = nbformat.read(path / NOTEBOOK, as_version=4)
    body, _ = exporter.from_notebook_node(notebook)
    page = PAGE.format(title=html.escape(path.name), style=STYLE, body=body)
    atomic_write(path / REPORT, page.encode())
    return path / REPORT
