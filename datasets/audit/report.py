"""An audit as text: what is wrong first, then what is in the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lookonce.datasets.audit.audit import Audit
from lookonce.datasets.audit.findings import LEVELS, Finding
from lookonce.datasets.audit.vocabulary import Vocabulary
from lookonce.text import bars, count, shown, table

NUM_QUESTIONS = 25
NUM_SIZES = 8
NUM_BARS = 20


def to_text(audit: Audit, more: Sequence[str] = ()) -> str:
    """All of it for a terminal; `more` are further parts, as text, before the vocabulary."""
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
    """In a sentence or two: how much there is, and how bad it looks."""
    files = "" if len(audit.files) == 1 else f" in {count(len(audit.files), 'file')}"
    text = f"{count(audit.num_questions, 'question')} about {count(audit.num_images, 'image')}{files}."
    return f"{text} {verdict(audit)}"


def verdict(audit: Audit) -> str:
    numbers = [
        f"{count(audit.count(level), noun)}"
        for level, noun in zip(LEVELS, ("error", "warning", "note"), strict=True)
        if audit.count(level)
    ]
    if not numbers:
        return "Nothing wrong was found."
    listed = " and ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers)
    return f"{listed}." + (" Mend the errors before you train." if audit.count("error") else "")


def file_lines(audit: Audit) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and lines of a table of the files."""
    numbers = [
        (
            file.num_records,
            file.num_questions,
            file.num_paths,
            file.num_images,
            file.num_unusable,
            file.num_text_only,
            file.num_several_images,
        )
        for file in audit.files
    ]
    header = ("file", "records", "questions", "image names", "distinct", "unusable", "no image", "several images")
    lines = [(file.name, *(f"{n:,}" for n in line)) for file, line in zip(audit.files, numbers, strict=True)]
    return header, list(lines)


def _findings(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.says}")
        lines += [f"{'':<11}{example}" for example in finding.examples]
        if len(finding.items) > len(finding.examples):
            lines.append(f"{'':<11}and {len(finding.items) - len(finding.examples):,} more")
    return "\n".join(lines)


def _per_image(audit: Audit) -> str:
    numbers = [(str(number), images) for number, images in audit.questions_per_image.items()]
    if not numbers:
        return ""
    mean = sum(n * images for n, images in audit.questions_per_image.items()) / audit.num_images
    if len(numbers) > NUM_BARS:
        numbers = grouped(audit.questions_per_image, NUM_BARS)
    return f"questions an image ({mean:.1f} on average), and how many images have so many\n{bars(numbers)}"


def grouped(counts: Mapping[int, int], num_groups: int) -> list[tuple[str, int]]:
    """Numbers and how often each occurs, in at most so many ranges of the same width."""
    low, high = min(counts), max(counts)
    width = -(-(high - low + 1) // num_groups)
    return [
        (
            str(start) if width == 1 else f"{start:,}-{start + width - 1:,}",
            sum(counts.get(number, 0) for number in range(start, start + width)),
        )
        for start in range(low, high + 1, width)
    ]


def size_lines(audit: Audit) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and lines of a table of the most frequent image sizes."""
    lines = [(f"{width} x {height}", f"{images:,}") for (width, height), images in audit.sizes.items()]
    if len(lines) > NUM_SIZES:
        rest = sum(list(audit.sizes.values())[NUM_SIZES:])
        lines = [*lines[:NUM_SIZES], (count(len(lines) - NUM_SIZES, "other size"), f"{rest:,}")]
    return ("image size", "images"), list(lines)


def _baselines(audit: Audit) -> str:
    lines = [f"  {baseline.text()}" for baseline in audit.baselines]
    return "\n".join(["always the majority answer of each question, without looking, is right for", *lines])


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
    """Questions that are asked more than once; what is asked once has no majority."""
    return [each for each in audit.vocabulary if each.num_asked > 1]
