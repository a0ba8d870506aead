"""The audit as text: what is wrong first, then what is in the files."""

from __future__ import annotations

from collections.abc import Sequence

from lookonce.datasets.audit.audit import Audit
from lookonce.datasets.audit.findings import LEVELS, Finding
from lookonce.datasets.audit.vocabulary import Vocabulary
from lookonce.plots import binned
from lookonce.text import bars, count, shown, table

NUM_QUESTIONS = 25
NUM_SIZES = 8
MAX_BARS = 20
"""The text lists this many questions, image sizes and bars of a histogram."""
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
        table(*size_lines(audit)) if audit.sizes else "",
        _baselines(audit),
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


def size_lines(audit: Audit) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return header and lines of a table of the most frequent image sizes."""
    lines = [(f"{width} x {height}", f"{images:,}") for (width, height), images in audit.sizes.items()]
    if len(lines) > NUM_SIZES:
        rest = sum(list(audit.sizes.values())[NUM_SIZES:])
        lines = [*lines[:NUM_SIZES], (count(len(lines) - NUM_SIZES, "other size"), f"{rest:,}")]
    return ("image size", "images"), list(lines)


def _baselines(audit: Audit) -> str:
    lines = [f"  {baseline.text()}" for baseline in audit.baselines]
    return "\n".join(["majority baseline (always each question's most frequent answer, without an image)", *lines])


def _questions(audit: Audit) -> str:
    lines = [
        (
            shown(each.question, 72),
            f"{each.num_asked:,}",
            f"{each.num_answers:,}",
            shown(each.majority, 40),
            f"{each.majority_share:.1%}",
        )
        for each in asked_again(audit)[:NUM_QUESTIONS]
    ]
    more = audit.num_distinct_questions - len(lines)
    if not lines:
        return f"{count(more, 'question')} asked once each"
    text = table(("question", "asked", "answers", "majority", "share"), lines)
    return f"{text}\nand {count(more, 'other question')}" if more else text


def asked_again(audit: Audit) -> list[Vocabulary]:
    """Return the questions that are asked more than once; the others have no majority."""
    return [each for each in audit.vocabulary if each.num_asked > 1]
