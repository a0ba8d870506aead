"""HTML pages by jinja2: the templates of a report, a study and an audit, in templates/, with one style sheet.

Design: a page is one file that needs no network and no script. Its content security policy forbids both. Jinja escapes
each value that a template shows, so nothing from data becomes markup; characters that no page may contain, control
characters and lone surrogates, are replaced. In LaTeX the filter `latex` escapes instead. Jinja is imported with the
first page.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookonce.text import count, duration, in_percent, one_line, shown, shown_p, size

if TYPE_CHECKING:
    from jinja2 import Environment

MADE_BY = "Made by lookonce report"
"""What stands at the end of the page of a report."""
MAX_TEXT = 240
"""Characters of a text of a record, or of an answer, that are shown."""
NOT_ALLOWED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""The characters that an HTML page may not contain."""
SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}"},
}
"""How LaTeX writes characters that mean something in it."""


def render(template: str, **values: Any) -> str:
    """The text of a template with these values."""
    return _environment().get_template(template).render(values)


def latex(text: str) -> str:
    """A text as LaTeX shows it, on one line."""
    return "".join(SPECIAL.get(character, character) for character in one_line(text))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: NOT_ALLOWED.sub("\ufffd", value) if type(value) is str else value,
    )
    environment.filters |= {
        "percent": lambda value: "" if value is None else f"{value:.1%}",
        "points": points,
        "spread": lambda value: "" if value is None else f"{100 * value:.1f}",
        "interval": lambda ends, absent="none": absent if ends is None else in_percent(ends),
        "number": lambda value: "" if value is None else f"{value:,}",
        "p": lambda value: "" if value is None else shown_p(value),
        "count": count,
        "duration": duration,
        "size": size,
        "shown": shown,
        "latex": latex,
        "words": words,
        "setting": setting,
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}.",
    }
    return environment


def points(value: float | None) -> str:
    """A difference of shares in percentage points, with its sign."""
    return "" if value is None else f"{100 * value:+.1f}"


def words(text: str, width: int = MAX_TEXT) -> str:
    """A text of a record, or an answer, as it is shown: on one line, cut if long, named if there is nothing to see."""
    return shown(text, width) if text.strip() else "(empty)"


def setting(value: Any) -> str:
    """A value of a run file on one line."""
    if value is None:
        return "none"
    return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 120)
