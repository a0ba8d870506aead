"""Answers to a question that say the same in other characters: order, separators, case, spaces, a unit left out.

Design: labels are what `;` separates, since commas stand in sentences. Each question's answers are compared with each
other only: a few hundred strings for labels, and one dictionary look-up an answer for free text.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping

from lookonce.datasets.audit.findings import Finding, Item, find
from lookonce.text import count, quoted, shown

SEPARATOR = re.compile(r"\s*;\s*")
UNIT = re.compile(r"(.*\d)\s*[^\W\d_]+", re.DOTALL)
"""A number and letters after it."""

Answers = Mapping[str, Mapping[str, int]]
"""By question: how often each answer is given."""


def plain(text: str) -> str:
    """A text without what does not change its meaning: case, doubled spaces, spaces around `;`, a final full stop."""
    return SEPARATOR.sub(";", " ".join(text.casefold().split())).rstrip(".;").strip()


def same_labels(answer: str) -> tuple[str, ...]:
    """Equal for answers of the same labels, in whatever order."""
    return tuple(sorted(set(plain(answer).split(";"))))


def find_label_variants(answers: Answers) -> list[Finding]:
    """Answers that are the same to a person and others to an exact match."""
    return [*_order(answers), *_writing(answers), *_separators(answers), *_units(answers)]


def _order(answers: Answers) -> list[Finding]:
    items = _variants(answers, same_labels, lambda answer: plain(answer).replace(";", "; "))
    return find(
        "label-order",
        "warning",
        items,
        f"{count(len(items), 'set')} of labels in more than one order; exact match calls "
        f"{count(_rarer(items), 'answer')} wrong that only differ in it",
        _example,
    )


def _writing(answers: Answers) -> list[Finding]:
    items = _variants(answers, plain, str)
    return find(
        "answer-writing",
        "warning",
        items,
        f"{count(len(items), 'answer')} written in more than one way (case, spaces, a full stop)",
        _example,
    )


def _variants(answers: Answers, meaning: Callable[[str], Hashable], writing: Callable[[str], str]) -> list[Item]:
    """Answers of one question that mean the same and are not written the same."""
    items: list[Item] = []
    for question, counts in answers.items():
        written: dict[Hashable, Counter[str]] = defaultdict(Counter)
        for answer, number in counts.items():
            written[meaning(answer)][writing(answer)] += number
        for same in written.values():
            if len(same) > 1:
                items.append({"question": question, "answers": dict(same.most_common())})
    return sorted(items, key=lambda item: -sum(item["answers"].values()))


def _rarer(items: list[Item]) -> int:
    return sum(sum(item["answers"].values()) - max(item["answers"].values()) for item in items)


def _separators(answers: Answers) -> list[Finding]:
    """How labels are separated, if not always in the same way."""
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
    return find(
        "separators",
        "warning",
        items if len(items) > 1 else [],
        f"labels are separated in {len(items)} ways",
        lambda item: (
            f"{quoted(item['separator'])} in {count(item['answers'], 'answer')}, as in {quoted(item['example'])}"
        ),
    )


def _units(answers: Answers) -> list[Finding]:
    """Labels that end in a number, beside the same with a unit."""
    items = []
    for question, counts in answers.items():
        labels: Counter[str] = Counter()
        for answer, number in counts.items():
            labels.update(dict.fromkeys(set(SEPARATOR.split(answer.strip())), number))
        for label, number in labels.items():
            match = UNIT.fullmatch(label)
            if match and match[1] in labels:
                items.append({"question": question, "answers": {label: number, match[1]: labels[match[1]]}})
    return find("units", "warning", items, f"{count(len(items), 'label')} with and without its unit", _example)


def _example(item: Item) -> str:
    answers = ", ".join(f"{quoted(answer, 50)} {number:,}" for answer, number in list(item["answers"].items())[:4])
    return f"{shown(item['question'], 60)} {answers}"
