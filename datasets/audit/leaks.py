"""Images that two files share, by content: also under other names.

What is tested on images that were trained on says little about others. That files ask the same questions is as it
should be; that they ask them about the same images is a leak. Images that are not there are compared by their paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from lookonce.datasets.audit.corpus import Material
from lookonce.datasets.audit.findings import Finding, Item
from lookonce.datasets.audit.questions import Asked
from lookonce.text import count, share, shown

NUM_EXAMPLES = 3


@dataclass(frozen=True)
class Side:
    """What is shared, as one of the two files has it."""

    file: str
    num_images: int
    """Distinct images of the file."""
    images_share: float
    """Of these, how many the other file has too."""
    num_questions: int
    """About images that both have."""
    questions_share: float


@dataclass(frozen=True)
class Leak:
    """What two files have in common."""

    one: Side
    other: Side
    num_images: int
    num_renamed: int
    """Of these images, those that no file name is the same for."""
    num_asked_in_both: int
    """The same question about the same image."""
    num_answered_otherwise: int
    """Of these, without an answer in common."""
    images: tuple[Item, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def finding(self) -> Finding:
        one, other = self.one, self.other
        renamed = f", {self.num_renamed:,} of them under other names" if self.num_renamed else ""
        says = (
            f"{one.file} and {other.file} share {count(self.num_images, 'image')}{renamed}: {one.images_share:.1%} and "
            f"{other.images_share:.1%} of their images, {one.questions_share:.1%} and {other.questions_share:.1%} of "
            f"their questions; {count(self.num_asked_in_both, 'question')} asked in both"
        )
        renamed_first = sorted(self.images, key=lambda item: item["one"] == item["other"])
        return Finding(
            "leaks", "error", self.num_images, says, tuple(map(_example, renamed_first[:NUM_EXAMPLES])), self.images
        )


def find_leaks(material: Material, questions: Iterable[Asked]) -> list[Leak]:
    """What every two files have in common, where it is not nothing."""
    asked: dict[str, list[Asked]] = defaultdict(list)
    for one in questions:
        asked[one.file].append(one)
    names = {file.name: _names(material, file.name) for file in material.files}
    pairs = combinations(names, 2)
    return [_leak(pair, names, asked) for pair in pairs if names[pair[0]].keys() & names[pair[1]].keys()]


def _names(material: Material, name: str) -> dict[str, set[str]]:
    """The names that a file has for each of its images."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in material.files:
        if file.name == name:
            for image in {image for record in file.records for image in record.images}:
                found[material.identity(image)].add(image.name)
    return found


def _leak(pair: tuple[str, str], names: Mapping[str, Mapping[str, set[str]]], asked: Mapping[str, list[Asked]]) -> Leak:
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


def _side(name: str, images: Mapping[str, set[str]], asked: list[Asked], shared: set[str]) -> Side:
    num_questions = sum(not shared.isdisjoint(one.images) for one in asked)
    return Side(name, len(images), share(len(shared), len(images)), num_questions, share(num_questions, len(asked)))


def _example(item: Item) -> str:
    one, other = shown(", ".join(item["one"])), shown(", ".join(item["other"]))
    return one if one == other else f"{one} is {other}"


def _answers(asked: Iterable[Asked]) -> dict[object, set[str]]:
    found: dict[object, set[str]] = defaultdict(set)
    for one in asked:
        if one.images:
            found[one.images, one.question].update(one.accepted)
    return found
