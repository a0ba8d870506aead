"""Answers to a question that mean the same but differ in order, separators, case, spaces or a unit.

Design: labels are separated by `;`, since sentences contain commas. Answers are compared only with answers to the same
question: a few hundred strings for labels, and one dictionary look-up per answer for free text.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping

from lookonce.datasets.audit.findings import Finding, Item, findings_from
from lookonce.text import count, quoted, shown

SEPARATOR = re.compile(r"(?:(?<!\s)\s+)?;\s*")
"""With the spaces around it; a search for `\\s*;` would take the square of the number of spaces."""
UNIT = re.compile(r"(.*\d)\s*[^\W\d_]+", re.DOTALL)
"""A label that ends in a number and letters, such as ">20mm"."""

Answers = Mapping[str, Mapping[str, int]]
"""For each question, how often each answer is given."""


def plain(text: str) -> str:
    """Remove what does not change a text's meaning: case, doubled spaces, spaces around `;`, a final full stop."""
    return SEPARATOR.sub(";", " ".join(text.casefold().split())).rstrip(".;").strip()


def same_labels(answer: str) -> tuple[str, ...]:
    """Return the labels of an answer; equal for answers that differ only in the order of their labels."""
    return tuple(sorted(set(plain(answer).split(";"))))


def find_label_variants(answers: Answers) -> list[Finding]:
    """Find answers that a person would call the same and an exact match would not."""
    return [*_order(answers), *_writing(answers), *_separators(answers), *_units(answers)]


def _order(answers: Answers) -> list[Finding]:
    items = _variants(answers, same_labels, lambda answer: plain(answer).replace(";", "; "))
    return findings_from(
        "label-order",
        "warning",
        items,
        f"{count(len(items), 'set')} of labels in more than one order; exact match would call "
        f"{count(_num_rarer(items), 'answer')} wrong only because of the order",
        _example,
    )


def _writing(answers: Answers) -> list[Finding]:
    items = _variants(answers, plain, str)
    return findings_from(
        "answer-writing",
        "warning",
        items,
        f"{count(len(items), 'answer')} written in more than one way (case, spaces, a full stop)",
        _example,
    )


def _variants(answers: Answers, meaning: Callable[[str], Hashable], writing: Callable[[str], str]) -> list[Item]:
    """Find answers of one question that mean the same and are written differently."""
    items: list[Item] = []
    for question, counts in answers.items():
        written: dict[Hashable, Counter[str]] = defaultdict(Counter)
        for answer, number in counts.items():
            written[meaning(answer)][writing(answer)] += number
        for same in written.values():
            if len(same) > 1:
                items.append({"question": question, "answers": dict(same.most_common())})
    return sorted(items, key=lambda item: -sum(item["answers"].values()))


def _num_rarer(items: list[Item]) -> int:
    """Count the answers that are not written in the most frequent way."""
    return sum(sum(item["answers"].values()) - max(item["answers"].values()) for item in items)


def _separators(answers: Answers) -> list[Finding]:
    """Find the separators of labels, if there are several."""
    styles: dict[str, Counter[str]] = defaultdict(Counter)
    for counts in answers.values():
        for answer, number in counts.items():
            for style in set(SEPARATOR.findall(answer)):
                styles[style][answer] += number
    items: list[Item] = [
        {"separator": style, "answers": counts.total(), "example": counts.most_common(1)[0][0]}
        for style, counts in styles.items()
    ]
    items.sort(key=lambda item: -item["answers"])
    return findings_from(
        "separators",
        "warning",
        items if len(items) > 1 else [],
        f"labels are separated in {len(items)} ways",
        lambda item: (
            f"{quoted(item['separator'])} in {count(item['answers'], 'answer')}, as in {quoted(item['example'])}"
        ),
    )


def _units(answers: Answers) -> list[Finding]:
    """Find labels that end in a number and also occur with a unit."""
    items = []
    for question, counts in answers.items():
        labels: Counter[str] = Counter()
        for answer, number in counts.items():
            labels.update(dict.fromkeys(set(SEPARATOR.split(answer.strip())), number))
        for label, number in labels.items():
            match = UNIT.fullmatch(label)
            if match and match[1] in labels:
                items.append({"question": question, "answers": {label: number, match[1]: labels[match[1]]}})
    return findings_from("units", "warning", items, f"{count(len(items), 'label')} with and without its unit", _example)


def _example(item: Item) -> str:
    answers = ", ".join(f"{quoted(answer, 50)} {number:,}" for answer, number in list(item["answers"].items())[:4])
    return f"{shown(item['question'], 60)} {answers}"
