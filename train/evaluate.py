"""Greedy answers, strict exact match, and what guessing would score.

Design: an answer is right if it is the reference, but for spaces around it; lenient metrics that call "no" right for
"none" have spoiled published numbers. A record with several `references` in its metadata, as `lookonce data prepare`
makes of rows whose answers differ, has several right answers. Beside the accuracy always stands the majority baseline:
the most frequent training answer of each question, given without looking at any image.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import GenerationConfig

from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Record
from lookonce.errors import UsageError
from lookonce.text import table
from lookonce.train.batch import Collator
from lookonce.train.model import PRECISIONS
from lookonce.train.prompt import Example


@dataclass(frozen=True)
class Prediction:
    """One question asked: what the reference says, what the model said, what guessing says."""

    origin: str
    images: tuple[str, ...]
    question: str
    answer: str
    predicted: str
    majority: str
    references: tuple[str, ...] = ()
    """Where there are several right answers, all of them."""

    @property
    def is_right(self) -> bool:
        return self._is_right(self.predicted)

    @property
    def is_majority_right(self) -> bool:
        return self._is_right(self.majority)

    def _is_right(self, given: str) -> bool:
        return given.strip() in {text.strip() for text in (self.answer, *self.references)}

    def to_json(self) -> dict[str, Any]:
        value = asdict(self) | {"right": self.is_right}
        if not self.references:
            del value["references"]
        return value


@dataclass(frozen=True)
class Score:
    """Shares of right answers over some questions."""

    num_questions: int
    exact_match: float
    majority: float


@dataclass(frozen=True)
class Evaluation:
    """Predictions and their scores, in all and by question text."""

    predictions: list[Prediction]
    overall: Score
    by_question: dict[str, Score]

    @classmethod
    def of(cls, predictions: list[Prediction]) -> Evaluation:
        questions = sorted({prediction.question for prediction in predictions})
        groups = {question: [p for p in predictions if p.question == question] for question in questions}
        return cls(predictions, score(predictions), {question: score(group) for question, group in groups.items()})

    def text(self) -> str:
        """A line a question, the overall score last."""
        scores = [*self.by_question.items(), ("all", self.overall)]
        lines = [(name, f"{s.num_questions:,}", f"{s.exact_match:.1%}", f"{s.majority:.1%}") for name, s in scores]
        return table(("question", "asked", "exact match", "majority"), lines)

    def to_json(self) -> dict[str, Any]:
        by_question = {question: asdict(value) for question, value in self.by_question.items()}
        return {"overall": asdict(self.overall), "by_question": by_question}


def score(predictions: Sequence[Prediction]) -> Score:
    """Exact match and majority baseline, as shares."""
    count = len(predictions)
    right, guessed = sum(p.is_right for p in predictions), sum(p.is_majority_right for p in predictions)
    return Score(count, right / max(count, 1), guessed / max(count, 1))


class Majority:
    """The most frequent training answer of each question; for a question never seen, the most frequent of all."""

    def __init__(self, records: Iterable[Record]) -> None:
        turns = [turn for record in records for turn in record.turns]
        by_question: dict[str, Counter[str]] = {}
        for turn in turns:
            by_question.setdefault(turn.question, Counter())[turn.answer] += 1
        self._best = {question: answers.most_common(1)[0][0] for question, answers in by_question.items()}
        self._fallback = Counter(turn.answer for turn in turns).most_common(1)[0][0] if turns else ""

    def answer(self, question: str) -> str:
        return self._best.get(question, self._fallback)


@torch.inference_mode()
def greedy_answers(
    model: Any,
    tokenizer: Any,
    collator: Collator,
    questions: Sequence[Example],
    max_new_tokens: int,
    batch_size: int,
    precision: str,
) -> list[str]:
    """The model's greedy answer to each question, in their order; `model` may wear an adapter.

    Questions of like length share a batch, which keeps padding small. `precision` is the run file's: half precisions
    answer under autocast, as they were trained.
    """
    device, dtype = model.device, PRECISIONS[precision]
    model.eval()
    answers = [""] * len(questions)
    order = sorted(range(len(questions)), key=lambda number: questions[number].num_tokens)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    with autocast, _plain_greedy(model, tokenizer, max_new_tokens), _bar(len(order)) as progress:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = collator.prompts([questions[number] for number in chosen])
            output = model.generate(**{name: tensor.to(device) for name, tensor in batch.items()})
            texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            for number, text in zip(chosen, texts, strict=True):
                answers[number] = text
            progress.update(len(chosen))
    return answers


@contextlib.contextmanager
def _plain_greedy(model: Any, tokenizer: Any, max_new_tokens: int) -> Iterator[None]:
    """Greedy and nothing else: no penalties or sampling that a checkpoint's own generation settings ask for."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    before = base.generation_config
    base.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    try:
        yield
    finally:
        base.generation_config = before


def _bar(total: int) -> Any:
    return tqdm(total=total, desc="answer questions", unit="question", leave=False, disable=None)


def shuffle_images(records: Sequence[Record], images: ImageIndex, seed: int = 0) -> list[Record]:
    """The records with every image replaced by another one of theirs: what a model that looks must not survive.

    Raises:
        UsageError: they show fewer than two distinct images.
    """
    keys = sorted({images.key_of[image] for record in records for image in record.images})
    if len(keys) < 2:
        raise UsageError(f"--shuffle-images needs at least two distinct images, and these records show {len(keys)}")
    random.Random(seed).shuffle(keys)
    other = dict(zip(keys, keys[1:] + keys[:1], strict=True))

    def swapped(image: Path) -> Path:
        return images.path_of[other[images.key_of[image]]]

    return [replace(record, images=tuple(swapped(image) for image in record.images)) for record in records]
