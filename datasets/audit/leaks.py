"""Images that two files share, compared by content, so also under other names.

A score on images that were trained on says little about other images. Files may ask the same questions; if they ask
them about the same images, that is a leak. Missing images are compared by their paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from lookonce.datasets.audit.corpus import Corpus
from lookonce.datasets.audit.findings import NUM_EXAMPLES, Finding, Item
from lookonce.datasets.audit.questions import QuestionAnswer
from lookonce.text import count, share, shown


@dataclass(frozen=True)
class Side:
    """One of the two files, and how much of it is shared."""

    file: str
    num_images: int
    """Distinct images of the file."""
    images_share: float
    """The share of them that the other file has too."""
    num_questions: int
    """Questions about images that both files have."""
    questions_share: float


@dataclass(frozen=True)
class Leak:
    """What two files share."""

    one: Side
    other: Side
    num_images: int
    num_renamed: int
    """The number of shared images that have no file name in common."""
    num_asked_in_both: int
    """The number of questions that both files ask about the same images."""
    num_answered_otherwise: int
    """The number of these questions that have no answer in common."""
    images: tuple[Item, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def finding(self) -> Finding:
        one, other = self.one, self.other
        renamed = f", {self.num_renamed:,} of them under other names" if self.num_renamed else ""
        says = (
            f"{one.file} and {other.file} share {count(self.num_images, 'image')}{renamed}: {one.images_share:.1%} and "
            f"{other.images_share:.1%} of their images, {one.questions_share:.1%} and {other.questions_share:.1%} of "
            f"their questions; both ask {count(self.num_asked_in_both, 'question')} about the same images"
        )
        renamed_first = sorted(self.images, key=lambda item: item["one"] == item["other"])
        return Finding(
            "leaks", "error", self.num_images, says, tuple(map(_example, renamed_first[:NUM_EXAMPLES])), self.images
        )


def find_leaks(corpus: Corpus, questions: Iterable[QuestionAnswer]) -> list[Leak]:
    """Return what every two files share, for those that share images."""
    asked: dict[str, list[QuestionAnswer]] = defaultdict(list)
    for one in questions:
        asked[one.file].append(one)
    names = {file.name: _names(corpus, file.name) for file in corpus.files}
    pairs = combinations(names, 2)
    return [_leak(pair, names, asked) for pair in pairs if names[pair[0]].keys() & names[pair[1]].keys()]


def _names(corpus: Corpus, name: str) -> dict[str, set[str]]:
    """Return the names that a file has for each of its images."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in corpus.files:
        if file.name == name:
            for image in {image for record in file.records for image in record.images}:
                found[corpus.identity(image)].add(image.name)
    return found


def _leak(
    pair: tuple[str, str], names: Mapping[str, Mapping[str, set[str]]], asked: Mapping[str, list[QuestionAnswer]]
) -> Leak:
    one, other = names[pair[0]], names[pair[1]]
    shared = [image for image in one if image in other]
    in_both = _answers(asked[pair[0]]), _answers(asked[pair[1]])
    both = in_both[0].keys() & in_both[1].keys()
    return Leak(
        one=_side(pair[0], one, asked[pair[0]], set(shared)),
        other=_side(pair[1], other, asked[pair[1]], set(shared)),
        num_images=len(shared),
        num_renamed=sum(one[image].isdisjoint(other[image]) for image in shared),
        num_asked_in_both=len(both),
        num_answered_otherwise=sum(in_both[0][key].isdisjoint(in_both[1][key]) for key in both),
        images=tuple(
            {"image": image, "one": sorted(one[image]), "other": sorted(other[image])} for image in sorted(shared)
        ),
    )


def _side(name: str, images: Mapping[str, set[str]], asked: list[QuestionAnswer], shared: set[str]) -> Side:
    num_questions = sum(not shared.isdisjoint(one.images) for one in asked)
    return Side(name, len(images), share(len(shared), len(images)), num_questions, share(num_questions, len(asked)))


def _example(item: Item) -> str:
    one, other = shown(", ".join(item["one"])), shown(", ".join(item["other"]))
    return one if one == other else f"{one} is {other}"


def _answers(asked: Iterable[QuestionAnswer]) -> dict[object, set[str]]:
    found: dict[object, set[str]] = defaultdict(set)
    for one in asked:
        if one.images:
            found[one.images, one.question].update(one.accepted)
    return found
