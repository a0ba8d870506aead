"""The section `eval` of the run file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lookonce.run.sections.numbers import Count, NumRows, NumTokens
from lookonce.run.sections.train import Frozen
from lookonce.settings import Free, FreeUnlessAnswersDecide, Section


def _as_word(value: object) -> object:
    """YAML reads the word true as a boolean."""
    return "true" if value is True else value


class EvalSection(Section):
    """The evaluation: greedy answers, scored by exact match."""

    every: FreeUnlessAnswersDecide[Literal["epoch"] | Count | None] = None
    """Answer validation questions while training, after each `epoch` or every this many steps, and log the exact match.
    By default only after training."""
    max_questions: FreeUnlessAnswersDecide[Count | None] = None
    """At most this many questions each time that `eval.every` asks for, about images drawn by `train.seed`; by default
    all of `data.val`."""
    split: Free[Literal["val", "test"]] = "val"
    """Split whose questions are answered after training; `lookonce eval --split` chooses another."""
    turns: FreeUnlessAnswersDecide[Annotated[Literal["own", "true"], BeforeValidator(_as_word)]] = "own"
    """In records of several turns, whose answers a later question follows: the model's `own`, as when it is used, or
    those of the record, which are `true`. An own answer that is empty or cut off is shown as "(not answered)"."""
    staged: FreeUnlessAnswersDecide[Annotated[Literal["own", "true", "none"], BeforeValidator(_as_word)]] = "own"
    """With `data.context`, whose answers to earlier questions are in the prompts: the model's `own`, for which the
    questions are answered stage by stage; those of the records, which are `true`; or `none`."""
    max_new_tokens: FreeUnlessAnswersDecide[Annotated[int, Field(ge=1, le=100_000)]] = 32
    """Longest answer in tokens; longer ones are cut off."""
    engine: Free[Literal["shared", "generate"]] = "shared"
    """How answers are computed. `shared`: the tokens of an image once for all its questions, whose answers grow
    together. `generate`: transformers' own, each question with its own copy of the image. Both give the same answers,
    apart from rounding."""
    frozen: Free[Frozen | None] = None
    """How frozen weights are kept when answers are computed after training, as `train.frozen`. By default as in
    training if that was `int8` or `nf4`, which the adapter fits, and otherwise as `train.precision` says."""
    tokens_per_wave: Free[NumTokens | None] = None
    """With `shared`, tokens of questions and answers that are in memory together, image tokens included; by default as
    many as the GPU has memory for, at most 65,536. A token of an 8B takes 147 kB. In models with linear attention there
    is at most one state for each 64 of them. If there is too little memory, parts of a wave are answered one after
    another."""
    batch_size: Free[NumRows] = 16
    """With `generate`, questions that are answered together. Limited by GPU memory."""
