"""Hashes of what a training depends on, by which a run folder recognises its own run.

Design: the cache's fingerprint covers the vision tower, so the model's hash leaves the tower out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from lookonce.datasets.curriculum.lessons import LessonOrder
from lookonce.datasets.records import Record
from lookonce.files import hash_file
from lookonce.run.sections.context import ContextSection


def hash_records(records: Iterable[Record], key_of: Callable[[Path], str]) -> str:
    """The sha256 over image keys, texts and order of some records."""
    digest = hashlib.sha256()
    for record in records:
        keys = [key_of(path) for path in record.images]
        digest.update(repr((keys, record.turns, record.system)).encode())
    return digest.hexdigest()


def hash_context(records: Iterable[Record], context: ContextSection) -> str:
    """The sha256 over the stages of some records."""
    return hashlib.sha256(repr([context.stage_of(record) for record in records]).encode()).hexdigest()


def answers_identity(context: ContextSection | None) -> dict[str, list[str] | None]:
    """The recorded input of the predictions that contexts have: the hash of each file that exists; None without any."""
    files = context.given if context else []
    return {"answers": [hash_file(path) for path in files if path.exists()] or None}


def hash_lessons(records: Iterable[Record], order: LessonOrder) -> str:
    """The sha256 over the lessons of some records."""
    return hashlib.sha256(repr([order.lesson_of(record) for record in records]).encode()).hexdigest()
