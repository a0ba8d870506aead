"""The questions of a split as the baselines are asked: without the adapter, with other images, with grey ones.

Design: they are made of the run's own questions, whose prompts keep their words, so nothing is tokenised again. The
answers are in the order of the run's, and each is compared with the run's answer to the same question. Each baseline
has an engine of its own, because an engine keeps recorded passes, and these are with or without the adapter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Record
from lookonce.eval.answers.blank import BlankImages
from lookonce.eval.answers.engines import engine_of
from lookonce.eval.answers.questions import Questions
from lookonce.eval.scores.headline import IN_CONTEXT, Baseline
from lookonce.run.open import OpenRun
from lookonce.train.data.tokenize import Example


def as_asked(questions: Questions, baseline: Baseline | None) -> Questions:
    """A run's own questions as a baseline is asked; None is the run itself."""
    if baseline is None:
        return questions
    if baseline == "true" or baseline == "none":
        return replace(Questions.of(questions.opened, questions.split, baseline), baseline=baseline)
    engine = engine_of(questions.opened)
    questions = replace(questions, baseline=baseline, engine=engine, waves=questions.dialogues.plan(engine))
    if baseline == "untuned":
        return questions
    return _shuffled(questions) if baseline == "shuffled" else _blank(questions)


def why_not(questions: Questions, baseline: Baseline | None) -> str:
    """Why a baseline has no meaning for these questions; empty if it has one."""
    keys = {key for example in questions.examples for key in example.image_keys}
    if baseline in IN_CONTEXT and questions.opened.run.data.context is None:
        return "--true-context and --no-context need `data.context` in the run file"
    if baseline in IN_CONTEXT and baseline == questions.staged:
        return f"`eval.staged` is {baseline}, so these are the answers of the run itself"
    if baseline == "shuffled" and len(keys) < 2:
        return f"--shuffle-images needs at least two distinct images, and these records have {len(keys)}"
    if baseline == "blank" and not keys:
        return "--blank-images needs images, and these records have none"
    return ""


def _shuffled(questions: Questions) -> Questions:
    opened = questions.opened
    shown = shuffle_images([record for record, _ in questions.asked], opened.images)
    examples = [_about(opened, example, record) for example, record in zip(questions.examples, shown, strict=True)]
    dialogues = questions.dialogues.about(shown, examples, opened.chat_tokenizer)
    return replace(questions, dialogues=dialogues, waves=dialogues.plan(questions.engine))


def _about(opened: OpenRun, example: Example, record: Record) -> Example:
    """The example with the images of a record."""
    keys = [opened.key_of(path) for path in record.images]
    grids = [opened.cache.grid_thw(key) for key in keys]
    return opened.chat_tokenizer.with_images((example.token_ids, example.supervised), record, keys, grids)


def _blank(questions: Questions) -> Questions:
    opened = questions.opened
    keys = {key for example in questions.examples for key in example.image_keys}
    source = BlankImages(opened, {key: opened.cache.grid_thw(key) for key in keys})
    engine = engine_of(opened, source)
    return replace(questions, engine=engine, waves=questions.dialogues.plan(engine))


def shuffle_images(records: Sequence[Record], images: ImageIndex, seed: int = 0) -> list[Record]:
    """The records with every image replaced by another one: a model that uses the images must score lower."""
    keys = sorted({images.key_of[image] for record in records for image in record.images})
    random.Random(seed).shuffle(keys)
    other = dict(zip(keys, keys[1:] + keys[:1], strict=True))

    def swapped(image: Path) -> Path:
        return images.path_of[other[images.key_of[image]]]

    return [replace(record, images=tuple(swapped(image) for image in record.images)) for record in records]
