"""Answers to questions about any images, with a run's adapter or without one.

Design: the model, the tower and the run's cache are opened when they are first needed, and stay for the next questions.
Questions are answered by the engines of an evaluation, in rounds of images (rounds.py): so they have its answers, and
all questions about an image share its tokens. What stops one question is the result of that question.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.records import Record
from lookonce.errors import ImageError, LookonceError, TrainingError
from lookonce.eval.answers.engines import engine_of
from lookonce.eval.answers.questions import Asked, dialogues_of, together, without_answers
from lookonce.eval.asking.asked import ask_each
from lookonce.eval.asking.features import LiveFeatures
from lookonce.eval.asking.pictures import Picture, PictureFiles, Shown
from lookonce.eval.asking.rounds import Keys, plan_rounds
from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.eval.decoding.talk import Talk
from lookonce.eval.decoding.waves import Room
from lookonce.files import hash_file
from lookonce.run.folder import RECORD
from lookonce.run.open import TO_ANSWER, OpenRun, open_run, without_run
from lookonce.text import Notify, quiet
from lookonce.train.model.frozen import model_settings
from lookonce.train.model.load import PRECISIONS, load_trained, load_untuned

Results = dict[int, Answer | LookonceError]
"""The answer to each question by its number, or why it has none."""


class Answerer:
    """Answers questions about any images.

        answerer = Answerer.open("runs/first")
        [answer] = answerer.answer("a.jpg", "Is there text?")
        print(answer.text, answer.logprob, answer.num_tokens, answer.ended)

    The model is loaded for the first question, onto the GPU if there is one, and stays. Images that are in the run's
    cache are read from it; for others the vision tower is loaded.
    """

    def __init__(self, opened: OpenRun, adapter: Path | None) -> None:
        """Use `Answerer.open`. Without an adapter the model answers untuned."""
        self.opened, self.adapter = opened, adapter
        self._chat, self._features = opened.chat_tokenizer, LiveFeatures(opened)
        self._engine = engine_of(opened, self._features)

    @classmethod
    def open(cls, run: Path | str, *, untuned: bool = False) -> Answerer:
        """Open a trained run by its folder or its run file, whose paths and section `eval` then count.

        With `untuned` the model answers without an adapter: the run need not be trained, and may also be a model folder
        or the name of a model on the Hub.

        Raises:
            LookonceError: there is no such run or model, or the model has changed since training.
        """
        place = Path(run)
        if untuned:
            needs = replace(TO_ANSWER, adapter=False)
            is_run = place.is_file() or (place / RECORD).exists()
            return cls(open_run(place if is_run else without_run(place), needs), None)
        opened = open_run(place, TO_ANSWER)
        opened.folder.check_inputs(opened.model_identity() | {"cache": opened.fingerprint.sha256})
        return cls(opened, opened.folder.adapter)

    def answer(
        self, images: Shown | Iterable[Shown], questions: str | Iterable[str], system: str | None = None
    ) -> list[Answer]:
        """The greedy answers to each question about each image: first all of the first image, in the order given.

        `images` is an image or a list of them: paths, or images of Pillow. A tuple of images is shown together, and an
        empty tuple asks without an image: `answer([("before.jpg", "after.jpg")], "What was removed?")`. `system` is the
        system text of all prompts.

        Raises:
            LookonceError: a question cannot be answered, for example because its image cannot be read.
        """
        prompts = [images] if isinstance(images, Picture | tuple) else images
        texts = [questions] if isinstance(questions, str) else [*questions]
        with TemporaryDirectory(prefix="lookonce-") as folder:
            shown = [one if isinstance(one, tuple) else (one,) for one in prompts]
            files = PictureFiles(Path(folder))
            return self._all(ask_each([tuple(map(files.path, one)) for one in shown], texts, system))

    def answer_records(self, records: Iterable[Record]) -> list[Answer]:
        """The greedy answers to all turns of some records, in order.

        A later turn follows the model's own answers, or those of the record if the run's `eval.turns` is true.

        Raises:
            LookonceError: a question cannot be answered.
        """
        return self._all([(record, turn) for record in records for turn in range(len(record.turns))])

    def talk(self) -> Talk:
        """A conversation that has not begun; its questions come from `dialogue`."""
        run = self.opened.run
        room = Room(0, run.batch.tokens_per_pack, run.eval.max_new_tokens)
        return Talk(self._model, self._chat, self._features, room, PRECISIONS[run.train.precision])

    @contextlib.contextmanager
    def dialogue(self, record: Record) -> Iterator[Dialogue]:
        """All questions of a record as a dialogue; within the block its images are encoded and the cache is in use.

        Raises:
            LookonceError: it cannot be asked, for example because its image cannot be read.
        """
        asked = [(record, turn) for turn in range(len(record.turns))]
        images = index_images([record], needs_one=False)
        usable, refused = _keys_of(asked, images)
        for error in refused.values():
            assert isinstance(error, LookonceError)
            raise error
        with self._features.in_use():
            self._features.drop([key for key in self._features.in_memory if key not in usable[0]])
            failed = self._features.encode(images, usable[0])
            yield self._dialogue(asked, range(len(asked)), usable[0], failed)

    def _all(self, asked: Sequence[Asked]) -> list[Answer]:
        """The answers to all questions; raises the first error."""
        answers: dict[int, Answer] = {}
        for results in self.results(asked, index_images((record for record, _ in asked), needs_one=False)):
            for number, result in results.items():
                if isinstance(result, LookonceError):
                    raise result
                answers[number] = result
        return [answers[number] for number in range(len(asked))]

    def identity(self) -> str:
        """The sha256 over what answers depend on, but the questions and the machine: model, adapter, settings."""
        opened, run = self.opened, self.opened.run
        files = sorted(self.adapter.glob("adapter_*")) if self.adapter else []
        settings: dict[str, Any] = {
            "adapter": {path.name: hash_file(path) for path in files},
            "model": opened.model_identity(),
            "cache": opened.fingerprint.sha256,
            "eval": run.eval.model_dump(exclude={"split", "frozen"}),
            "precision": model_settings(run),
        }
        if self._chat.template_options:
            settings["template"] = self._chat.template_options
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def results(
        self, asked: Sequence[Asked], images: ImageIndex, known: Set[int] = frozenset(), notify: Notify = quiet
    ) -> Iterator[Results]:
        """Answer questions, wave by wave; a wave whose questions are all `known` is left out.

        `images` are those of the questions.

        Raises:
            LookonceError: no question can be answered: the model cannot be loaded, or the cache is damaged.
        """
        usable, refused = _keys_of(asked, images)
        yield refused
        numbers = {some[0]: some for some in together(asked, self.opened.run.eval.turns) if some[0] in usable}
        of_first = {first: usable[first] for first in numbers}
        rounds = plan_rounds(of_first, lambda key: self._features.num_tokens(images, key))
        last_round = {key: number for number, members in enumerate(rounds) for one in members for key in usable[one]}
        with self._features.in_use():
            for number, members in enumerate(rounds):
                self._features.drop([key for key in self._features.in_memory if last_round.get(key, -1) < number])
                chosen = {first: numbers[first] for first in members}
                if not known >= {one for some in chosen.values() for one in some}:
                    yield from self._round(asked, chosen, of_first, images, known, notify)

    def _round(
        self,
        asked: Sequence[Asked],
        members: Mapping[int, Sequence[int]],
        keys_of: Mapping[int, Keys],
        images: ImageIndex,
        known: Set[int],
        notify: Notify,
    ) -> Iterator[Results]:
        """Answer some dialogues: the numbers of the questions of each, by its first one."""
        failed = self._features.encode(images, list(dict.fromkeys(key for one in members for key in keys_of[one])))
        dialogues: dict[int, Dialogue] = {}
        refused: Results = {}
        for first, some in members.items():
            try:
                dialogues[first] = self._dialogue(asked, some, keys_of[first], failed)
            except LookonceError as error:
                refused |= dict.fromkeys(some, error)
        yield refused
        numbers = list(dialogues)
        for wave in self._engine.plan(list(dialogues.values())):
            chosen = {numbers[place]: dialogues[numbers[place]] for place in wave}
            if not known >= {one for first in chosen for one in members[first]}:
                answers = self._answers(chosen, notify)
                yield {
                    one: found for first in chosen for one, found in zip(members[first], answers[first], strict=True)
                }

    def _dialogue(
        self, asked: Sequence[Asked], numbers: Sequence[int], keys: Keys, failed: Mapping[str, ImageError]
    ) -> Dialogue:
        """The dialogue of some questions; raises LookonceError if there is none."""
        if error := next((failed[key] for key in keys if key in failed), None):
            raise error
        own, grids = [asked[number] for number in numbers], [self._features.grid_thw(key) for key in keys]
        every = range(len(own))
        prompts = [self._chat.question(*one, keys, grids) for one in without_answers(own, [every])]
        [dialogue] = dialogues_of([every], prompts, self._chat)
        return dialogue

    def _answers(
        self, dialogues: Mapping[int, Dialogue], notify: Notify
    ) -> dict[int, Sequence[Answer | LookonceError]]:
        """The answers to a wave; the questions of one that does not fit the memory have an error instead."""
        try:
            return dict(zip(dialogues, self._engine.answers(self._model, [*dialogues.values()], notify), strict=True))
        except TrainingError as error:
            if len(dialogues) == 1:
                return {number: [error] * one.num_questions for number, one in dialogues.items()}
        numbers, half = list(dialogues), len(dialogues) // 2
        parts = [{number: dialogues[number] for number in some} for some in (numbers[:half], numbers[half:])]
        return self._answers(parts[0], notify) | self._answers(parts[1], notify)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._chat.tokenizer

    @property
    def special_token_ids(self) -> list[int]:
        """Token ids that no answer has in the prompts of later questions."""
        return self._chat.special_token_ids

    @cached_property
    def _model(self) -> Any:
        model, run = self.opened.model_folder, self.opened.run
        return load_trained(model, run, self.adapter) if self.adapter else load_untuned(model, run)


def _keys_of(asked: Sequence[Asked], images: ImageIndex) -> tuple[dict[int, Keys], Results]:
    """The image keys of each question, and the errors of those whose images cannot be read."""
    usable: dict[int, Keys] = {}
    refused: Results = {}
    for number, (record, _) in enumerate(asked):
        if reason := next((images.unusable[path] for path in record.images if path in images.unusable), None):
            refused[number] = ImageError(reason)
        else:
            usable[number] = tuple(images.key_of[path] for path in record.images)
    return usable, refused
