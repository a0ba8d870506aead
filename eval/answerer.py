"""Answers to a user's questions about any images, with a run's adapter or without one: `Answerer`, and conversations.

Model, tower and cache are opened when they are first needed, and stay for the next questions. Questions are turns of
records, answered by the engines of evaluations. What stops one question is the result of that question.

A *round* has questions about some images, as many as fit, so that each image is encoded once and few are in memory.
Rounds follow from the questions alone. An image that several rounds show stays in memory until the last. Features are
read from the run's cache if it has them, or encoded as by its build, on a CPU with its bits, and not written to it.

In a conversation each question follows the model's own answers. The chat template puts images before the first
question, so other images begin another conversation. Questions are answered by `generate`, which hands out words as
they come; the turns before are computed again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from itertools import chain
from itertools import count as count_up
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers import TextStreamer

from lookonce.cache.build.encode import Encoder, ImageFeatures
from lookonce.cache.build.progress import planned_tokens
from lookonce.cache.format import Grid
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.claims import using
from lookonce.cache.store.metadata import MANIFEST, PlannedImage, Shard
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.datasets.context import NOT_ANSWERED
from lookonce.datasets.formats.image_references import IMAGE_SUFFIX, SUFFIXES
from lookonce.datasets.formats.record import is_utf8
from lookonce.datasets.images import ImageIndex, index_images, read_bytes
from lookonce.datasets.records import Record, RecordsFile, Turn
from lookonce.errors import ImageError, LookonceError, RecordsError, TrainingError, UsageError
from lookonce.eval.answers.engines import engine_of, greedy_answers
from lookonce.eval.answers.questions import Question, dialogue_numbers, without_answers
from lookonce.eval.decoding.dialogue import Answer, Dialogue
from lookonce.files import files_below, hash_file
from lookonce.run.folder import RECORD
from lookonce.run.open import TO_ANSWER, OpenRun, open_run, run_for_model
from lookonce.text import Notify, count, quiet, quoted
from lookonce.train.data.batches import CPU
from lookonce.train.data.dataset import png_bytes
from lookonce.train.model.frozen import model_settings
from lookonce.train.model.load import load_trained, load_untuned

Picture = str | Path | Image.Image
"""An image: its file, or the image itself."""
Shown = Picture | tuple[Picture, ...]
"""What a question is about: an image, or several that are shown together."""
Results = dict[int, Answer | LookonceError]
"""The answer to each question by its number, or why it has none."""
ROUND_TOKENS = 131_072
"""The most image tokens of a round; their features take 4.3 GB with an 8B."""
Keys = tuple[str, ...]


def read_questions(path: Path, image_root: Path | None = None) -> tuple[list[Question], dict[str, RecordsError]]:
    """All questions of a records file, and the errors of malformed records by their locations.

    The last question of a record may lack its answer.

    Raises:
        RecordsError: the file is missing or has no questions.
    """
    broken: dict[str, RecordsError] = {}
    records = list(RecordsFile(path, image_root, unanswered=True, broken=broken.__setitem__))
    if not records:
        raise next(iter(broken.values()))
    return [(record, turn) for record in records for turn in range(len(record.turns))], broken


def ask_each(
    prompts: Iterable[tuple[Path, ...]], questions: Sequence[str], system: str | None = None
) -> list[Question]:
    """Each question about each prompt's images, those of the first prompt first; raises UsageError if one is empty or
    not UTF-8."""
    for text in (*questions, system or ""):
        _check_utf8(text)
    if empty := [number for number, text in enumerate(questions, start=1) if not text.strip()]:
        raise UsageError(f"question {empty[0]} of {len(questions)} is empty; leave it out or write one")
    return [
        (Record(images, (Turn(text, ""),), system, origin=f"{', '.join(map(str, images)) or 'question'}:{number}"), 0)
        for images in (tuple(map(absolute, prompt)) for prompt in prompts)
        for number, text in enumerate(questions, start=1)
    ]


def _check_utf8(text: str) -> None:
    if not is_utf8(text):
        raise UsageError(f"{quoted(text)} is not UTF-8; set the terminal to UTF-8, or convert its file with iconv")


def match_images(patterns: Iterable[str]) -> list[Path]:
    """The files that patterns such as `folder/*.jpg` match, sorted, each once; `**` matches any number of folders.

    A folder stands for the images in it and in its subfolders, by their suffixes.

    Raises:
        UsageError: a pattern matches no file, or a folder has no image.
    """
    images: dict[Path, None] = {}
    for pattern in patterns:
        name = os.path.expanduser(pattern)
        if os.path.isdir(name):
            matches = sorted(str(path) for path in files_below(Path(name)) if IMAGE_SUFFIX.search(path.name))
            problem = (
                f"is a folder without images: no name in it or in its subfolders ends in .{', .'.join(SUFFIXES)}; name "
                "another folder, or a pattern of files"
            )
        else:
            matches = [name] if os.path.isfile(name) else glob.glob(name, recursive=True)
            matches = sorted(filter(os.path.isfile, matches))
            problem = "matches no file; put the pattern into quotes, and check the folder"
        if not matches:
            raise UsageError(f"--images {pattern} {problem}")
        images |= dict.fromkeys(map(Path, matches))
    return list(images)


def absolute(path: Path) -> Path:
    """The path without `..`, which marks the paths that lead out of the root of a records file."""
    return Path(os.path.abspath(path.expanduser()))


def file_of(picture: Picture, path: Path) -> Path:
    """The file of an image; one of Pillow is written to `path`, and then read and encoded like all others."""
    if not isinstance(picture, Image.Image):
        return Path(picture)
    path.write_bytes(png_bytes(picture))
    return path


def plan_rounds(keys_of: Mapping[int, Keys], tokens_of: Callable[[str], int]) -> list[list[int]]:
    """The numbers of the questions of each round, by the keys of their images and the tokens of each image."""
    about: dict[Keys, list[int]] = {}
    for number, keys in keys_of.items():
        about.setdefault(keys, []).append(number)
    rounds: list[list[int]] = []
    inside: set[str] = set()
    free = 0
    for keys, numbers in about.items():
        needed = sum(map(tokens_of, {*keys} - inside))
        if needed > free or not rounds:
            rounds.append([])
            inside, free = set(), ROUND_TOKENS
            needed = sum(map(tokens_of, {*keys}))
        rounds[-1] += numbers
        inside |= {*keys}
        free = max(free - needed, 0)
    return rounds


class LiveFeatures:
    """The features of images that are asked about."""

    has_tower: ClassVar[bool] = False

    def __init__(self, opened: OpenRun) -> None:
        self._opened = opened
        self._encoded: dict[str, ImageFeatures] = {}

    @cached_property
    def _cache(self) -> VisionCache | None:
        """The run's cache, if it is built; it may lack any image."""
        opened = self._opened
        is_built = (opened.cache_folder / MANIFEST).exists()
        return find_cache(opened.run.cache.dir, opened.fingerprint) if is_built else None

    @cached_property
    def _tower(self) -> Tower:
        return self._opened.load_tower()

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Keep others from changing the cache within a block; raises CacheError if another process repairs it."""
        folder, cache = self._opened.cache_folder, self._opened.run.cache
        is_built = (folder / MANIFEST).exists()
        return using(folder, "lookonce predict", cache.claim_s) if is_built else contextlib.nullcontext()

    def encode(self, images: ImageIndex, keys: Collection[str]) -> dict[str, ImageError]:
        """Encode those of some images that are neither in the cache nor in memory; returns the errors by key."""
        missing = [key for key in keys if key not in self._encoded and not (self._cache and key in self._cache)]
        if not missing:
            return {}
        failed: dict[str, ImageError] = {}
        fingerprint = self._opened.fingerprint
        planned = tuple(PlannedImage(key, self.num_tokens(images, key), (str(images.path_of[key]),)) for key in missing)
        encoder = Encoder(images.path_of, self._opened.processor, self._tower, fingerprint)
        with contextlib.closing(encoder):
            for batch in encoder.run([Shard("the images of a round", planned)]):
                failed |= {key: ImageError(failure.reason) for key, failure in batch.failed.items()}
                for image in batch.images:
                    self._encoded[image.key] = ImageFeatures.of(image.tensors, image.grid_thw, fingerprint)
        return failed

    def num_tokens(self, images: ImageIndex, key: str) -> int:
        """About the number of an image's tokens, by its header."""
        return planned_tokens(self._opened.processor, images.size_of.get(key))

    @property
    def in_memory(self) -> Collection[str]:
        """The keys of the images that were encoded and not dropped."""
        return self._encoded.keys()

    def drop(self, keys: Collection[str]) -> None:
        """Forget the features of some images that were encoded."""
        for key in keys:
            del self._encoded[key]

    def grid_thw(self, key: str) -> Grid:
        if key in self._encoded:
            return self._encoded[key].grid_thw
        assert self._cache is not None
        return self._cache.grid_thw(key)

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        features_of = {key: self._encoded[key].features for key in keys if key in self._encoded}
        if self._cache and (cached := [key for key in dict.fromkeys(keys) if key not in features_of]):
            features_of |= zip(cached, self._cache.get_many(cached, pin=device.type == "cuda"), strict=True)
        on_device = {key: features.to(device, non_blocking=True) for key, features in features_of.items()}
        return torch.cat([on_device[key] for key in keys])


class Answerer:
    """Answers questions about any images.

        answerer = Answerer.open("runs/first")
        [answer] = answerer.answer("a.jpg", "Is there text?")
        print(answer.text, answer.logprob, answer.num_tokens, answer.ended)

    The model is loaded for the first question, onto the GPU if there is one, and stays in memory. Images that are in
    the run's cache are read from it; for others the vision tower is loaded.
    """

    def __init__(self, opened: OpenRun, adapter: Path | None) -> None:
        """Use `Answerer.open`. Without an adapter the model answers untuned."""
        self.opened, self.adapter = opened, adapter
        self._chat, self._features = opened.chat_tokenizer, LiveFeatures(opened)
        self._engine = engine_of(opened.changed(features=self._features))
        self.system = opened.run.data.system
        """The system text of questions that have none of their own."""

    @classmethod
    def open(cls, run: Path | str, *, untuned: bool = False) -> Answerer:
        """Open a trained run by its folder, or by a run file, whose paths and section `eval` then apply.

        With `untuned` the model answers without an adapter: the run need not be trained, and may also be a model folder
        or the name of a model on the Hub.

        Raises:
            LookonceError: there is no such run or model, or the model has changed since training.
        """
        path = Path(run)
        if untuned:
            needs = replace(TO_ANSWER, adapter=False)
            is_run = path.is_file() or (path / RECORD).exists()
            return cls(open_run(path if is_run else run_for_model(path), needs), None)
        opened = open_run(path, TO_ANSWER)
        opened.folder.check_inputs(opened.model_identity() | {"cache": opened.fingerprint.sha256})
        return cls(opened, opened.folder.adapter)

    def answer(
        self, images: Shown | Iterable[Shown], questions: str | Iterable[str], system: str | None = None
    ) -> list[Answer]:
        """The greedy answers to each question about each image: first all for the first image, in order.

        `images` is an image or a list of them: paths, or images of Pillow. A tuple of images is shown together, and an
        empty tuple asks without an image: `answer([("before.jpg", "after.jpg")], "What was removed?")`. `system` is the
        system text of all prompts, by default that of the run (`data.system`).

        Raises:
            LookonceError: a question cannot be answered, for example because its image cannot be read.
        """
        prompts = [images] if isinstance(images, Picture | tuple) else images
        texts = [questions] if isinstance(questions, str) else [*questions]
        with TemporaryDirectory(prefix="lookonce-") as folder:
            paths = (Path(folder, f"{number}.png") for number in count_up(1))
            shown = [prompt if isinstance(prompt, tuple) else (prompt,) for prompt in prompts]
            return self._answer_all(ask_each([tuple(map(file_of, group, paths)) for group in shown], texts, system))

    def with_system(self, questions: Sequence[Question]) -> list[Question]:
        """The questions as they are asked: with the run's system text in records that have none of their own."""
        shown = {id(record): record.with_system(self.system) for record, _ in questions}
        return [(shown[id(record)], turn) for record, turn in questions]

    def answer_records(self, records: Iterable[Record]) -> list[Answer]:
        """The greedy answers to all turns of some records, in order.

        A later turn follows the model's own earlier answers, or the record's if the run's `eval.turns` is `reference`.

        Raises:
            LookonceError: a question cannot be answered.
        """
        return self._answer_all([(record, turn) for record in records for turn in range(len(record.turns))])

    def next_answer(self, record: Record, answers: Sequence[Answer], streamer: TextStreamer) -> Answer:
        """The answer to the last question of a record, after the `answers` to those before; `streamer` gets its tokens.

        Raises:
            LookonceError: it cannot be answered, for example because its image cannot be read.
        """
        questions = [(record, turn) for turn in range(len(record.turns))]
        images = index_images([record], needs_one=False)
        usable, refused = _keys_of(questions, images)
        for error in refused.values():
            raise error
        with self._features.in_use():
            self._features.drop([key for key in self._features.in_memory if key not in usable[0]])
            failed = self._features.encode(images, usable[0])
            prompt = self._dialogue(questions, range(len(questions)), usable[0], failed).prompt(answers)
            collator = self.opened.row_collator(self._features)
            [answer] = greedy_answers(self.opened, self._model, collator, [prompt], streamer)
        return answer

    def _answer_all(self, questions: Sequence[Question]) -> list[Answer]:
        """The answers to all questions; raises the first error."""
        questions = self.with_system(questions)
        answers: dict[int, Answer] = {}
        for results in self.results(questions, index_images((record for record, _ in questions), needs_one=False)):
            for number, result in results.items():
                if isinstance(result, LookonceError):
                    raise result
                answers[number] = result
        return [answers[number] for number in range(len(questions))]

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
        self, questions: Sequence[Question], images: ImageIndex, done: Set[int] = frozenset(), notify: Notify = quiet
    ) -> Iterator[Results]:
        """Answer questions, batch by batch; a batch whose questions are all `done` is left out.

        Raises:
            LookonceError: no question can be answered: the model cannot be loaded, or the cache is damaged.
        """
        usable, refused = _keys_of(questions, images)
        yield {**refused}
        groups = dialogue_numbers(questions, self.opened.run.eval.turns)
        numbers = {group[0]: group for group in groups if group[0] in usable}
        rounds = plan_rounds(
            {first: usable[first] for first in numbers}, lambda key: self._features.num_tokens(images, key)
        )
        last_round = {key: n for n, members in enumerate(rounds) for first in members for key in usable[first]}
        with self._features.in_use():
            for number, members in enumerate(rounds):
                self._features.drop([key for key in self._features.in_memory if last_round.get(key, -1) < number])
                if done >= {number for first in members for number in numbers[first]}:
                    continue
                keys = dict.fromkeys(key for first in members for key in usable[first])
                failed = self._features.encode(images, list(keys))
                dialogues: dict[int, Dialogue] = {}
                for first in members:
                    try:
                        dialogues[first] = self._dialogue(questions, numbers[first], usable[first], failed)
                    except LookonceError as error:
                        yield dict.fromkeys(numbers[first], error)
                firsts = list(dialogues)
                for batch in self._engine.plan(list(dialogues.values())):
                    chosen = {firsts[index]: dialogues[firsts[index]] for index in batch}
                    if not done >= {number for first in chosen for number in numbers[first]}:
                        answers = self._answers(chosen, notify)
                        pairs = (zip(numbers[first], answers[first], strict=True) for first in chosen)
                        yield dict(chain.from_iterable(pairs))

    def _dialogue(
        self, questions: Sequence[Question], numbers: Sequence[int], keys: Keys, failed: Mapping[str, ImageError]
    ) -> Dialogue:
        """The dialogue of some questions; raises LookonceError if there is none."""
        if error := next((failed[key] for key in keys if key in failed), None):
            raise error
        turns, grids = [questions[number] for number in numbers], [self._features.grid_thw(key) for key in keys]
        unanswered = without_answers(turns, [range(len(turns))])
        return Dialogue.of([self._chat.question(*turn, keys, grids) for turn in unanswered], self._chat)

    def _answers(
        self, dialogues: Mapping[int, Dialogue], notify: Notify
    ) -> dict[int, Sequence[Answer | LookonceError]]:
        """The answers to a batch; the questions of one that does not fit the memory have an error instead."""
        try:
            [answers] = self._engine.stream(self._model, [[*dialogues.values()]], notify)
            return dict(zip(dialogues, answers, strict=True))
        except TrainingError as error:
            if len(dialogues) == 1:
                return {number: [error] * dialogue.num_questions for number, dialogue in dialogues.items()}
        numbers, half = list(dialogues), len(dialogues) // 2
        parts = [{number: dialogues[number] for number in chosen} for chosen in (numbers[:half], numbers[half:])]
        return self._answers(parts[0], notify) | self._answers(parts[1], notify)

    @cached_property
    def _model(self) -> Any:
        model, run = self.opened.model_folder, self.opened.run
        return load_trained(model, run, self.adapter) if self.adapter else load_untuned(model, run)


def _keys_of(questions: Sequence[Question], images: ImageIndex) -> tuple[dict[int, Keys], dict[int, ImageError]]:
    """The image keys of each question, and the errors of those whose images cannot be read."""
    usable: dict[int, Keys] = {}
    refused: dict[int, ImageError] = {}
    for number, (record, _) in enumerate(questions):
        if reason := next((images.unusable[path] for path in record.images if path in images.unusable), None):
            refused[number] = ImageError(reason)
        else:
            usable[number] = tuple(images.key_of[path] for path in record.images)
    return usable, refused


class Conversation:
    """Questions and answers so far."""

    def __init__(self, answerer: Answerer, images: Sequence[Path] = (), system: str | None = None) -> None:
        """Raises ImageError if an image cannot be read, and UsageError if the system text is not UTF-8."""
        _check_utf8(system or "")
        self._answerer, self._system = answerer, system or answerer.system
        self.show(images)

    def show(self, images: Sequence[Path]) -> None:
        """Begin again, about these images; if one cannot be read, raises ImageError and changes nothing."""
        paths = tuple(map(absolute, images))
        for path in paths:
            read_bytes(path)
        self._images = paths
        self.reset()

    def reset(self) -> None:
        """Begin again, about the same images."""
        self._questions: tuple[str, ...] = ()
        self._answers: tuple[Answer, ...] = ()

    def ask(self, question: str, on_text: Callable[[str], None] = lambda text: None) -> Answer:
        """The answer to a question, which becomes part of the conversation; `on_text` gets its words as they come.

        Raises:
            LookonceError: it cannot be answered; the conversation is then as before.
        """
        _check_utf8(question)
        questions = (*self._questions, question)
        turns = tuple(Turn(text, NOT_ANSWERED) for text in questions)
        record = Record(self._images, turns, self._system, origin="the conversation")
        tokenizer: Any = self._answerer.opened.chat_tokenizer.tokenizer
        streamer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = lambda text, stream_end=False: on_text(text)  # words, as soon as they are whole
        try:
            answer = self._answerer.next_answer(record, self._answers, streamer)
        except torch.OutOfMemoryError:
            raise UsageError(
                f"the GPU is out of memory for a conversation of {count(len(turns), 'question')}; begin again "
                "with /reset"
            ) from None
        self._questions = questions
        self._answers += (answer,)
        return answer
