"""Which images are trained on, and what of the test is known from the training.

Design: what is split are families of images, and never questions. A family is all that could tell of each other: files
with the same bytes whatever their names, files that the set calls by the same name whatever their bytes, the
transformed variants of an image, and the values of those columns that are to stay together (the frames of one video).

The families are put in order by their smallest image name, or key where the set has no names, shuffled by a generator
that the seed makes, and dealt: the first to val, the next to test, the rest to train. So a split depends on the seed
and on which images there are; not on the order of the rows, nor on the form in which somebody has the set, although
re-saved files have other bytes. The same on every machine and for ever: a text as seed goes through sha512. Numbers are
exact: 6,500 images are 4,550, 975 and 975.

It is not the division that others have drawn with the same seed from another order. For theirs, give lists of names.

A leak is an image of the held-out part one of whose family is in train: measured by content, for whatever split.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lookonce.datasets.prepare.rows import Row, text_of

PARTS = ("train", "val", "test")
ENDING = re.compile(r"\.(jpe?g|png|gif|bmp|tiff?|webp)$", re.IGNORECASE)
"""Of an image's file name."""
SYNONYMS = {
    "validation": "val",
    "validate": "val",
    "valid": "val",
    "dev": "val",
    "training": "train",
    "testing": "test",
}


def part_of(name: str) -> str:
    """What a set calls a part, by our name; empty if it is none (Kvasir-VQA's only one is called `raw`)."""
    name = SYNONYMS.get(name.strip().lower(), name.strip().lower())
    return name if name in PARTS else ""


def families(rows: Iterable[Row], together: Sequence[str] = ()) -> dict[str, str]:
    """For each image key the name of its family: its smallest image name, or key where there are none."""
    parent: dict[str, str] = {}

    def find(node: str) -> str:
        root = node
        while parent.setdefault(root, root) != root:
            root = parent[root]
        while parent[node] != root:
            parent[node], node = root, parent[node]
        return root

    links: dict[tuple[str, ...], None] = {}  # many rows say the same
    for row in rows:
        named = (f"name {row.image_id}",) if row.image_id else ()
        shared = (f"{column} {text_of(row.metadata[column])}" for column in together if column in row.metadata)
        links[f"key {row.key}", *named, *shared] = None
    for first, *others in links:
        root = find(first)
        for other in others:
            parent[find(other)] = root
    best: dict[str, str] = {}
    for node in parent:
        kind, _, name = node.partition(" ")
        if kind in ("name", "key"):
            rank = f"{kind == 'key':d}{name}"  # names before keys
            best[find(node)] = min(best.get(find(node), rank), rank)
    return {node.removeprefix("key "): best[find(node)][1:] for node in parent if node.startswith("key ")}


def split_by_image(
    rows: Sequence[Row], shares: Mapping[str, float], seed: int, together: Sequence[str] = ()
) -> dict[str, str]:
    """The part of each image key; `shares` are of images, variants not counted."""
    family_of = families(rows, together)
    members: dict[str, set[str]] = {name: set() for name in family_of.values()}
    for row in rows:
        if not row.variant:
            members[family_of[row.key]].add(row.key)
    order = sorted(members)
    random.Random(f"split, seed {seed}").shuffle(order)
    num_images = sum(len(keys) for keys in members.values())
    part_of_family: dict[str, str] = {}
    for part in ("val", "test"):
        room = round(num_images * shares[part])
        for name in order:
            if name not in part_of_family and 0 < len(members[name]) <= room:
                part_of_family[name] = part
                room -= len(members[name])
    return {key: part_of_family.get(name, "train") for key, name in family_of.items()}


def split_by_lists(names: Iterable[str], lists: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The part of each image by its name, with or without its ending; empty for those that no list names."""
    part_of_name = {_bare(name): part for part, listed in lists.items() for name in listed}
    return {name: part_of_name.get(_bare(name), "") for name in names}


def _bare(name: str) -> str:
    return ENDING.sub("", name)


@dataclass(frozen=True)
class Leak:
    """How much of a held-out part is known from the training."""

    part: str
    num_images: int
    num_leaked: int
    """Images of which the training has one of the family."""
    num_questions: int
    num_leaked_questions: int
    """Questions about those images."""

    @property
    def share(self) -> float:
        return self.num_leaked / self.num_images if self.num_images else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "images": self.num_images,
            "also_in_train": self.num_leaked,
            "share": round(self.share, 4),
            "questions": self.num_questions,
            "about_images_in_train": self.num_leaked_questions,
        }


def measure_leaks(keys: Iterable[str], parts: Iterable[str], family_of: Mapping[str, str]) -> list[Leak]:
    """What of val and of test is in train, given the image key and the part of each question."""
    asked: dict[str, dict[str, int]] = {part: {} for part in PARTS}
    for key, part in zip(keys, parts, strict=True):
        if part:
            name = family_of[key]
            asked[part][name] = asked[part].get(name, 0) + 1
    leaks = []
    for part in ("val", "test"):
        known = asked[part].keys() & asked["train"].keys()
        num_known = sum(asked[part][name] for name in known)
        if asked[part] and asked["train"]:
            leaks.append(Leak(part, len(asked[part]), len(known), sum(asked[part].values()), num_known))
    return leaks
