"""The same question about the same image, more than once in a file.

Answers agree if one is among the other's correct ones; the order, the separators and the case of labels do not count.
Where they agree it is a duplicate, where they do not a contradiction: a model can not learn both, and no metric is
right about them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

from lookonce.datasets.audit.findings import Finding, Item, find
from lookonce.datasets.audit.labels import same_labels
from lookonce.datasets.audit.questions import Asked
from lookonce.text import count, quoted, shown


def find_repeats(questions: Iterable[Asked]) -> list[Finding]:
    """Duplicates and contradictions."""
    groups: dict[object, list[Asked]] = defaultdict(list)
    for one in questions:
        groups[one.file, one.images, one.before, one.question].append(one)
    repeated = [group for group in groups.values() if len(group) > 1]
    agreeing = [agree(group) for group in repeated]
    contradictions = [_item(group) for group, same in zip(repeated, agreeing, strict=True) if not same]
    duplicates = [_item(group) for group, same in zip(repeated, agreeing, strict=True) if same]
    return [
        *find(
            "contradictions",
            "error",
            contradictions,
            f"{count(len(contradictions), 'question')} about an image, asked again with another answer; merge them "
            "into one record with several `references`, or drop them",
            _example,
        ),
        *find(
            "duplicates",
            "warning",
            duplicates,
            f"{count(len(duplicates), 'question')} about an image, asked again with the same answer",
            _example,
        ),
    ]


def agree(group: Sequence[Asked]) -> bool:
    """Whether every two of them have a correct answer in common."""
    accepted = {frozenset(same_labels(answer) for answer in one.accepted) for one in group}
    return not any(one.isdisjoint(other) for one, other in combinations(accepted, 2))


def _item(group: Sequence[Asked]) -> Item:
    answers = [{"answer": one.answer, "place": one.place} for one in group]
    return {"question": group[0].question, "image": group[0].name, "answers": answers}


def _example(item: Item) -> str:
    answers = ", ".join(f"{quoted(each['answer'], 40)} ({each['place']})" for each in item["answers"][:4])
    return f"{shown(item['question'], 60)} about {shown(item['image'], 40)}: {answers}"
