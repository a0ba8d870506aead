"""The same question about the same image, more than once in a file.

Two answers agree if they have a correct answer in common; the order, the separators and the case of labels do not
count. If all answers agree, the question is a duplicate. If not, it is a contradiction: a model cannot learn both
answers, and no score of such a question is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

from lookonce.datasets.audit.findings import Finding, Item, findings_from
from lookonce.datasets.audit.labels import same_labels
from lookonce.datasets.audit.questions import QuestionAnswer
from lookonce.text import count, quoted, shown


def find_repeats(questions: Iterable[QuestionAnswer]) -> list[Finding]:
    """Find duplicates and contradictions."""
    groups: dict[object, list[QuestionAnswer]] = defaultdict(list)
    for one in questions:
        groups[one.file, one.images, one.before, one.question].append(one)
    repeated = [(group, all_agree(group)) for group in groups.values() if len(group) > 1]
    contradictions = [_item(group) for group, agree in repeated if not agree]
    duplicates = [_item(group) for group, agree in repeated if agree]
    return [
        *findings_from(
            "contradictions",
            "error",
            contradictions,
            f"{count(len(contradictions), 'question')} asked again about the same image with another answer; merge "
            "them into one record with several `references`, or drop them",
            _example,
        ),
        *findings_from(
            "duplicates",
            "warning",
            duplicates,
            f"{count(len(duplicates), 'question')} asked again about the same image with the same answer",
            _example,
        ),
    ]


def all_agree(group: Sequence[QuestionAnswer]) -> bool:
    """Whether every two of them have a correct answer in common."""
    accepted = {frozenset(same_labels(answer) for answer in one.accepted) for one in group}
    return not any(one.isdisjoint(other) for one, other in combinations(accepted, 2))


def _item(group: Sequence[QuestionAnswer]) -> Item:
    answers = [{"answer": one.answer, "place": one.origin} for one in group]
    return {"question": group[0].question, "image": group[0].image_names, "answers": answers}


def _example(item: Item) -> str:
    answers = ", ".join(f"{quoted(each['answer'], 40)} ({each['place']})" for each in item["answers"][:4])
    return f"{shown(item['question'], 60)} about {shown(item['image'], 40)}: {answers}"
