"""Sphinx configuration: the Markdown pages of the repository as one site, and the Python API from its docstrings.

The source folder is the repository itself, so that pages outside docs/ (formats, reports, the log) are pages of the
site, and links between them are the same there and in a checkout. Nothing is fetched from the internet.
"""

from __future__ import annotations

import re
from typing import Any

from lookonce.version import __version__

project = "lookonce"
author = "the lookonce maintainers"
project_copyright = "the lookonce maintainers, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    *("docs/*.md", "benchmarks/*.md", "benchmarks/peers/*.md", "cache/FORMAT.md"),
    *("datasets/README.md", "slurm/README.md"),
    *("containers/README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LOG.md", "SECURITY.md"),
]
exclude_patterns = ["src", ".*", "bench", "build", "caches", "data", "dist", "logs", "runs", "docs/_build"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"lookonce {release}"
html_extra_path = ["redirect"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False


def as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written as Markdown: `x` is code, and so is an indented block after a paragraph."""
    blocks = []
    for block in "\n".join(lines).split("\n\n"):
        is_code = block.startswith("    ")
        blocks += ["::", block] if is_code else [re.sub(r"(?<!`)`([^`]+)`(?!`)(\w?)", _as_code, block)]
    lines[:] = "\n\n".join(blocks).split("\n")


def _as_code(found: re.Match[str]) -> str:
    """Markup ends before a space only, which an escaped one is without being shown: `name`s."""
    return f"``{found[1]}``" + (f"\\ {found[2]}" if found[2] else "")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_restructured_text)
