"""The audit as text, and as one HTML page: what is wrong first, then what is in the files, and some images.

Design: the page is templates/audit.html.jinja. Everything is in it: style sheet, plots as SVG, and as data: URLs a
contact sheet, images with a question each, drawn from a seed. It can be sent by mail and opened from a disk. 48 images
take about a megabyte.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import ImageOps

from lookonce import page
from lookonce.datasets.audit.audit import Audit, Vocabulary
from lookonce.datasets.audit.findings import LEVELS, Corpus, Finding
from lookonce.datasets.images import UNDECODABLE, distinct, open_image, read_many
from lookonce.errors import ImageError
from lookonce.files import threaded_map
from lookonce.text import bars, binned, count, shown, table

NUM_QUESTIONS, NUM_SIZES, MAX_BARS = 25, 8, 20
"""The text lists this many questions, image sizes and bars of a histogram."""
NUM_DRAWN = 30
"""The page draws the answers of this many questions."""
NUM_IMAGES, SIDE = 48, 300
"""A contact sheet has this many images, whose longer side has this many pixels."""
BASELINE = "majority baseline (always each question's most frequent answer, without an image)"
RARE = ("malformed", "unusable", "no image", "several images")
"""Columns of the table of files that are often all zero."""


def to_text(audit: Audit, more: Sequence[str] = ()) -> str:
    """Return the whole audit for a terminal; `more` are further sections, shown before the histograms and tables."""
    parts = [
        summary(audit),
        table(*file_lines(audit)),
        _findings(audit.findings),
        *more,
        _per_image(audit),
        table(*size_lines(audit)) if audit.image_sizes else "",
        "\n".join([BASELINE, *(f"  {baseline.text()}" for baseline in audit.baselines)]) if audit.num_questions else "",
        _questions(audit),
    ]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


def summary(audit: Audit) -> str:
    """Return a sentence or two: how much there is, and how many findings of each level."""
    files = "" if len(audit.files) == 1 else f" in {count(len(audit.files), 'file')}"
    num_unread = audit.num_named_images - audit.num_images
    unread = f", {num_unread:,} of which cannot be read" if num_unread else ""
    images = f"{count(audit.num_named_images, 'image')}{unread}"
    return f"{count(audit.num_questions, 'question')} about {images}{files}. {verdict(audit)}"


def verdict(audit: Audit) -> str:
    numbers = [f"{count(audit.count(level), level)}" for level in LEVELS if audit.count(level)]
    if not numbers:
        return "No problems found."
    joined = " and ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers)
    return f"{joined}." + (" Fix the errors before training." if audit.count("error") else "")


def file_lines(audit: Audit) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return header and lines of a table of the files; columns of what is rare are left out if they are all zero."""
    columns = {
        "records": [file.num_records for file in audit.files],
        "malformed": [file.num_malformed for file in audit.files],
        "questions": [file.num_questions for file in audit.files],
        "image names": [file.num_paths for file in audit.files],
        "distinct": [file.num_images for file in audit.files],
        "unusable": [file.num_unusable for file in audit.files],
        "no image": [file.num_text_only for file in audit.files],
        "several images": [file.num_several_images for file in audit.files],
    }
    columns = {name: numbers for name, numbers in columns.items() if name not in RARE or any(numbers)}
    lines = zip(*columns.values(), strict=True)
    header = ("file", *columns)
    return header, [(file.name, *(f"{n:,}" for n in line)) for file, line in zip(audit.files, lines, strict=True)]


def _findings(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.says}")
        lines += [f"{'':<11}{example}" for example in finding.examples]
        if finding.num_more > 0:
            lines.append(f"{'':<11}and {finding.num_more:,} more")
    return "\n".join(lines)


def _per_image(audit: Audit) -> str:
    numbers = [(str(number), images) for number, images in audit.questions_per_image.items()]
    if not numbers:
        return ""
    mean = sum(n * images for n, images in audit.questions_per_image.items()) / audit.num_named_images
    if len(numbers) > MAX_BARS:
        numbers = binned(audit.questions_per_image, MAX_BARS)
    return f"questions per image ({mean:.1f} on average): number of images\n{bars(numbers)}"


def size_lines(audit: Audit, most: int = NUM_SIZES) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return header and lines of a table of the most frequent image sizes."""
    lines = [(f"{width} x {height}", f"{images:,}") for (width, height), images in audit.image_sizes.items()]
    if len(lines) > most:
        num_images = sum(list(audit.image_sizes.values())[most:])
        lines = [*lines[:most], (count(len(lines) - most, "other size"), f"{num_images:,}")]
    return ("image size", "images"), list(lines)


def _questions(audit: Audit) -> str:
    lines = [
        (
            shown(question.question, 72),
            f"{question.num_asked:,}",
            f"{question.num_answers:,}",
            shown(question.majority, 40),
            f"{question.majority_share:.1%}",
        )
        for question in repeated_questions(audit)[:NUM_QUESTIONS]
    ]
    more = audit.num_distinct_questions - len(lines)
    if not lines:
        return f"{count(more, 'question')} asked once each" if more else ""
    text = table(("question", "asked", "answers", "majority", "share"), lines)
    return f"{text}\nand {count(more, 'other question')}" if more else text


def repeated_questions(audit: Audit) -> list[Vocabulary]:
    """Return the questions that are asked more than once; the others have no majority."""
    return [question for question in audit.questions if question.num_asked > 1]


@dataclass(frozen=True)
class Thumbnail:
    """A small image, and one of the questions about it."""

    name: str
    file: str
    question: str
    answer: str
    url: str


def draw_contact_sheet(corpus: Corpus, seed: int = 0, num_images: int = NUM_IMAGES) -> list[Thumbnail]:
    """Draw at most `num_images` distinct images from the seed; images that cannot be decoded are left out."""
    path_of = {key: info.path for key, info in distinct(corpus.images).items() if not info.problem}
    keys = sorted(path_of)
    rng = random.Random(f"sheet {seed}")
    chosen = rng.sample(keys, min(num_images, len(keys)))
    questions = _questions_about(corpus, set(chosen))
    small = small_jpegs(path_of[key] for key in chosen)
    return [
        Thumbnail(path_of[key].name, *rng.choice(questions[key]), data_url(small[path_of[key]]))
        for key in chosen
        if small[path_of[key]]
    ]


def small_jpegs(paths: Iterable[Path], side: int = SIDE) -> dict[Path, bytes]:
    """The images at some paths as JPEGs of at most `side` pixels; empty for those that cannot be read or decoded."""
    return dict(threaded_map(partial(_shrink, side=side), read_many(paths)))


def data_url(jpeg: bytes) -> str:
    """A JPEG as a URL that holds it."""
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def _questions_about(corpus: Corpus, keys: set[str]) -> dict[str, list[tuple[str, str, str]]]:
    """Return file, question and answer of all questions about each image."""
    about: dict[str, list[tuple[str, str, str]]] = {key: [] for key in keys}
    for file in corpus.files:
        for record in file.records:
            for key in {corpus.identity(image) for image in record.images} & keys:
                about[key] += [(file.name, turn.question, turn.answer) for turn in record.turns]
    return about


def _shrink(read: tuple[Path, bytes | ImageError], side: int) -> tuple[Path, bytes]:
    path, data = read
    if isinstance(data, ImageError):
        return path, b""
    try:
        with open_image(data) as image:
            image.draft("RGB", (side, side))
            small = ImageOps.exif_transpose(image).convert("RGB")
    except (*UNDECODABLE, MemoryError):
        return path, b""
    small.thumbnail((side, side))
    target = io.BytesIO()
    small.save(target, "JPEG", quality=78)
    return path, target.getvalue()


@dataclass(frozen=True)
class Section:
    """A section of the page from another module: some tables, and a histogram of how often each number occurs."""

    title: str
    text: str
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]] = ()
    counts: Mapping[int, int] | None = None
    x_name: str = ""
    y_name: str = ""


def to_page(audit: Audit, sections: Sequence[Section] = (), sheet: Sequence[Thumbnail] = ()) -> str:
    """Return the whole page; `sections` are shown before the answers."""

    def histogram(counts: Mapping[int, int], x_name: str, y_name: str) -> str:
        return page.to_svg(page.histogram(counts, x_name, y_name), f"{y_name} by {x_name}")

    sizes = f"{count(len(audit.image_sizes), 'image size')}: width and height"
    names = ", ".join(file.name for file in audit.files)
    return page.render(
        "audit.html.jinja",
        title=f"Audit of {names}",
        names=names,
        audit=audit,
        summary=summary(audit),
        files=file_lines(audit),
        sections=sections,
        repeated_questions=repeated_questions(audit)[:NUM_DRAWN],
        size_table=size_lines(audit),
        all_sizes=size_lines(audit, len(audit.image_sizes)),
        sizes=page.to_svg(page.points(audit.image_sizes, "width, pixels", "height, pixels"), sizes)
        if audit.image_sizes
        else "",
        histogram=histogram,
        sheet=sheet,
        footer="Made by lookonce data audit. Its --json has the same numbers and all items of each finding.",
    )
