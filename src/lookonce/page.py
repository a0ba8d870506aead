"""Pages by jinja2 and plots by matplotlib: those of a report, a study and an audit, with one style sheet.

Design of pages: a page is one file that needs no network and no script; its content security policy forbids both. Jinja
escapes each value that a template shows, so nothing from data becomes markup; characters that no page may contain,
control characters and lone surrogates, are replaced. In LaTeX the filter `latex` escapes instead.

Design of plots: the same numbers give the same bytes. Matplotlib's own defaults are used whatever the user's
matplotlibrc says, ids come from a fixed salt, and no date is written. Text stays text, so it can be searched and read
aloud. Within a page colours are variables of its style sheet.

Jinja and matplotlib, which takes 0.3 s, are imported with the first page and the first plot.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lookonce.files import atomic_write
from lookonce.text import binned, count, duration, in_percent, one_line, shown, shown_p, size

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MADE_BY = "Made by lookonce report"
"""What stands at the end of the page of a report."""
MAX_TEXT = 240
"""Characters of a text of a record, or of an answer, that are shown."""
NOT_ALLOWED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}"},
}
"""How LaTeX writes characters that mean something in it."""


def render(template: str, **values: Any) -> str:
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
        "points": lambda value: "" if value is None else f"{100 * value:+.1f}",
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


def words(text: str, width: int = MAX_TEXT) -> str:
    """A text of a record, or an answer, as it is shown: on one line, cut if long, named if there is nothing to see."""
    return shown(text, width) if text.strip() else "(empty)"


def setting(value: Any) -> str:
    if value is None:
        return "none"
    return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 120)


WIDTH = 520
"""The width of a plot, in SVG units."""
INK, SOFT, GRID, BAR, MARK = "#1d232b", "#5d6873", "#e2e5e8", "#3b7a9e", "#b4541a"
LINES = ("#2c6a91", "#b4541b", "#2f7a4d", "#86479a", "#6b6410", "#a8325a")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
"""More lines than there are colours have dashes."""
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--line", BAR: "--bar", MARK: "--mark", "#ffffff": "--card"} | {
    colour: f"--line{number}" for number, colour in enumerate(LINES, start=1)
}
"""The names of the colours in the style sheet of a page."""
MAX_BINS = 40
STYLE: Any = {
    "svg.hashsalt": "lookonce",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-4, 6),
    "axes.unicode_minus": False,
    "grid.color": GRID,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.markersize": 5,
    "figure.facecolor": "none",
    "path.simplify_threshold": 0.5,
}


@dataclass(frozen=True)
class Line:
    """Values over x."""

    name: str
    """In the legend; a line without a name is not in it."""
    points: Mapping[int, float] | Mapping[float, float]
    kind: Literal["faint", "line", "marked"]
    """`marked` has a circle at each point."""
    number: int = 0
    """Which colour and dashes it has."""


@dataclass(frozen=True)
class Panel:
    """Lines with a common vertical axis."""

    name: str
    lines: Sequence[Line]
    limits: tuple[float, float] | None = None
    """The range that is drawn; by default that of the values."""
    height: int = 200


@contextmanager
def _style() -> Iterator[None]:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it would name the folder of its list of fonts
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # text stays text: the reader's fonts have it
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")


def to_svg(figure: Figure, label: str) -> str:
    """A plot as an element of a page; screen readers read `label`."""
    text = io.StringIO()
    with _style():
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|<!--.*?-->", "", text.getvalue(), flags=re.S)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # those that nothing refers to; another plot has them too
    svg = re.sub(
        "#[0-9a-f]{6}", lambda match: f"var({VARIABLES[match[0]]})" if match[0] in VARIABLES else match[0], svg
    )
    box = re.search('viewBox="[^"]*"', svg)
    assert box, "matplotlib writes the size of a plot"
    start = f'<svg {box[0]} role="img" aria-label="{escape(one_line(label))}">'
    return re.sub(r"\s*\n\s*", "\n", start + svg.partition("<svg")[2].partition(">")[2]).strip()


@_style()
def write_pdf(figure: Figure, path: Path) -> None:
    """Write a plot as PDF, with TrueType fonts, which journals accept."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="pdf", metadata={"CreationDate": None})


@_style()
def curves(panel: Panel, x_name: str) -> Figure:
    """Draw the lines of a panel, with their names below it."""
    named = len(panel.lines) if any(line.name for line in panel.lines) else 0
    figure = _figure(panel.height + 16 * -(-named // 2))
    axis = figure.subplots()
    axis.set_xlabel(x_name)
    axis.set_title(shown(panel.name, 60), color=SOFT)
    for place, line in enumerate(panel.lines):
        width = 1.6 + 0.9 * min(len(panel.lines) - 1 - place, 4) if line.kind != "faint" else 0.7
        axis.plot(
            [*line.points],
            [*line.points.values()],
            color=LINES[line.number % len(LINES)],
            linestyle=DASHES[line.number // len(LINES) % len(DASHES)],
            linewidth=width,  # so that a line that lies on another one does not hide it
            alpha=0.35 if line.kind == "faint" else 1,
            marker="o" if line.kind == "marked" else None,
            label=f" {shown(line.name, 36)}" if line.name else "_",  # matplotlib hides names that start with _
        )
    if panel.limits and -math.inf < panel.limits[0] < panel.limits[1] < math.inf:
        margin = 0.04 * (panel.limits[1] - panel.limits[0])
        axis.set_ylim(panel.limits[0] - margin, panel.limits[1] + margin)
    handles = {name: line for line in axis.get_lines() if (name := str(line.get_label()))[0] == " "}
    if handles:
        figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=2)
    return figure


@_style()
def forest(variants: Sequence[Mapping[str, Any]], measure: str) -> Figure:
    """Draw each variant's score and seeds beside the majority, and its difference to the first variant.

    `variants` are those of `lookonce study report --json`; `measure` names what counts.
    """
    from matplotlib.ticker import PercentFormatter

    figure = _figure(110 + 34 * len(variants))
    left, right = figure.subplots(1, 2, sharey=True)
    for place, variant in enumerate(variants):
        _interval(left, place, variant["score"], variant["interval"], BAR, is_filled=True)
        dots = variant["score_by_seed"]
        step = min(0.14, 0.45 / max(len(dots), 1))  # each seed has a height of its own: none hides another
        heights = [place + 0.2 + step * number for number in range(len(dots))]
        left.plot(dots, heights, "o", color=BAR, alpha=0.6, markersize=3.5, label="_" if place else " a seed")
        if variant["difference"] is not None:
            is_apart, ends = variant["is_distinguishable"], variant["difference_interval"]
            ends = ends and [100 * end for end in ends]
            _interval(right, place, 100 * variant["difference"], ends, MARK if is_apart else SOFT, is_filled=is_apart)
    left.axvline(variants[0]["majority"], color=MARK, linestyle="--", linewidth=1.4, label=" majority baseline")
    right.axvline(0, color=INK, linewidth=1)
    left.xaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    left.set_yticks(range(len(variants)), [shown(variant["variant"], 24) for variant in variants])
    left.set_ylim(len(variants) - 0.3, -0.6)
    left.set_xlabel(shown(measure, 40))
    right.set_xlabel(f"points above {shown(variants[0]['variant'], 24)}")
    for axis in (left, right):
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", length=0)
        axis.locator_params(axis="x", nbins=5)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _interval(
    axis: Axes, place: int, value: float, ends: Sequence[float] | None, colour: str, *, is_filled: bool
) -> None:
    if ends:
        axis.plot(ends, (place, place), color=colour, linewidth=2.4, solid_capstyle="round", label="_")
    axis.plot(value, place, "s", color=colour, markerfacecolor=colour if is_filled else "white", label="_")


@_style()
def histogram(counts: Mapping[int, int], x_name: str, y_name: str) -> Figure:
    """Draw how often each number occurs, in at most `MAX_BINS` ranges, with the number above each column."""
    bins = binned(counts, MAX_BINS)
    names = [name for name, _ in bins]
    figure = _figure(260)
    axis = figure.subplots()
    drawn = axis.bar(range(len(bins)), [number for _, number in bins], color=BAR)
    turned = 90 if len(bins) > 12 else 0
    labels = [f"{number:,}" if number else "" for _, number in bins]
    axis.bar_label(drawn, labels, padding=2, rotation=turned, fontsize=8 if turned else 10, color=INK)
    every = -(-max(map(len, names)) * len(names) // 70)
    axis.set_xticks(range(0, len(bins), every), names[::every])
    middle, half = (len(bins) - 1) / 2, max(len(bins), 5) / 2
    axis.set_xlim(middle - half, middle + half)
    axis.margins(y=0.15)
    _name(axis, x_name, y_name)
    return figure


@_style()
def points(counts: Mapping[tuple[int, int], int], x_name: str, y_name: str) -> Figure:
    """Draw a circle for each pair of numbers; its area shows how often the pair occurs."""
    figure = _figure(340)
    axis = figure.subplots()
    pairs = sorted(counts, key=lambda pair: -counts[pair])
    most = max(counts.values(), default=1)
    areas = [20 + 600 * counts[pair] / most for pair in pairs]
    axis.scatter([x for x, _ in pairs], [y for _, y in pairs], areas, color=BAR, alpha=0.6, edgecolors=BAR)
    axis.margins(0.1)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    _name(axis, x_name, y_name)
    return figure


def _name(axis: Axes, x_name: str, y_name: str) -> None:
    axis.set_xlabel(x_name)
    axis.set_title(y_name, color=SOFT)
    axis.grid(visible=False, axis="x")
    for side in (axis.xaxis, axis.yaxis):
        if hasattr(side.get_major_formatter(), "set_scientific"):
            side.set_major_formatter("{x:,.0f}")
