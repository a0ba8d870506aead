"""Which images are trained on, and how much of the held-out images is also in train.

Design: image families are split, never questions. A family is all images that could reveal each other: files with the
same bytes whatever their names, files with the same name in the dataset whatever their bytes, augmented variants of an
image, and images with the same value of a column that is to stay together (the frames of one video).

Families are sorted by their smallest image name, or by key if the dataset has no names, shuffled by a seeded generator,
and assigned: the first to val, the next to test, the rest to train. So a split depends on the seed and on the images,
not on the order of the rows or on the file format of the source, although re-saved files have other bytes. It is the
same on every machine and with every version of Python: a text as seed goes through sha512. Numbers are exact: 6,500
images are 4,550, 975 and 975.

It is not the split that others have drawn with the same seed from another order. To use theirs, give lists of names.

A leak is an image of val or test whose family is also in train. It is measured by content, for every split.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lookonce.datasets.image_suffixes import without_suffix
from lookonce.datasets.prepare.rows import Row, text_of
from lookonce.text import nfc

PARTS = ("train", "val", "test")
"""The parts of a split."""
SYNONYMS = {
    "validation": "val",
    "validate": "val",
    "valid": "val",
    "dev": "val",
    "training": "train",
    "testing": "test",
}


def part_of(name: str) -> str:
    """Our name for a dataset's name of a part; empty if there is none (Kvasir-VQA's only part is called `raw`)."""
    name = SYNONYMS.get(name.strip().lower(), name.strip().lower())
    return name if name in PARTS else ""


def families(rows: Iterable[Row], together: Sequence[str] = ()) -> dict[str, str]:
    """The family of each image key, named by its smallest image name, or by its smallest key if it has no names."""
    parent: dict[str, str] = {}

    def find(node: str) -> str:
        root = node
        while parent.setdefault(root, root) != root:
            root = parent[root]
        while parent[node] != root:
            parent[node], node = root, parent[node]
        return root

    links: dict[tuple[str, ...], None] = {}  # many rows have the same links
    for row in rows:
        named = (f"name {nfc(row.image_id)}",) if row.image_id else ()
        shared = (f"{column} {nfc(text_of(row.metadata[column]))}" for column in together if column in row.metadata)
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
    """The part of each image key; `shares` are shares of the images, without variants."""
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
    """The part of each image by its name, with or without its suffix; empty for those that are in no list."""
    part_of_name = {without_suffix(nfc(name)): part for part, listed in lists.items() for name in listed}
    return {name: part_of_name.get(without_suffix(nfc(name)), "") for name in names}


@dataclass(frozen=True)
class Leak:
    """How much of val or test is also in train."""

    part: str
    num_images: int
    num_leaked: int
    """Images whose family is also in train."""
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
    """How much of val and of test is in train, given the image key and the part of each question."""
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
