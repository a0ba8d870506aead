"""The section `batch` of the run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lookonce.datasets.curriculum import LessonOrder
from lookonce.run.sections.numbers import Count, NumRows, NumTokens
from lookonce.settings import Same, Section


def _kind_of_order(value: Any) -> str:
    """Names the kind of order that a value is, so that errors are about that kind alone."""
    return "name" if isinstance(value, str) else "mapping"


Order = Annotated[
    Annotated[Literal["random", "as_given"], Tag("name")] | Annotated[LessonOrder, Tag("mapping")],
    Discriminator(_kind_of_order),
]


NumSamples = Annotated[int, Field(ge=1, le=1_000_000)]


class BatchSection(Section):
    """How records become optimizer steps and forward passes."""

    mode: Same[Literal["shared", "packed", "separate"]] = "shared"
    """`shared`: all questions about an image share one pass over its tokens, several images per sequence. `packed`:
    each question has its own copy of the image, without padding. `separate`: each question is a padded row of a batch.
    All three train on the same steps with the same loss."""
    samples_per_step: Same[NumSamples] = 16
    """Records (questions) per optimizer step: the effective batch size, over all forward passes and all GPUs."""
    tokens_per_pack: Same[NumTokens] = 8192
    """Tokens of the longest pack in `shared` and `packed` mode, limited by GPU memory. Longer records are left out;
    otherwise loss and gradients do not depend on it."""
    questions_per_image: Same[Count | None] = None
    """At most this many questions about an image stay together when the order is shuffled. By default all of them; 1 is
    the usual random order."""
    samples_per_forward: Same[NumRows] = 4
    """Rows per forward pass in `separate` mode. Limited by GPU memory; loss and gradients do not depend on it."""
    max_tokens: Same[NumTokens] = 4096
    """Records with more tokens are left out and counted; so are records that are longer than a pack."""
    order: Same[Order] = "random"
    """`random` shuffles by the seed in every epoch. `as_given` keeps the order of the records files: each step has the
    next records, whatever their images. {by: stage, lessons: [1, 2, 3]} trains in every epoch on all records whose
    metadata has stage 1, then on those of stage 2, then 3, each lesson shuffled. Steps have their full size: one may
    hold the end of a lesson and the beginning of the next."""
    loss: Same[Literal["token", "sample"]] = "token"
    """`token`: mean over all supervised tokens of a step. `sample`: mean over its samples, each with the mean of its
    tokens, so that long answers do not count more."""

    @property
    def has_packs(self) -> bool:
        """Whether packs go through the model, and not padded rows."""
        return self.mode != "separate"

    @property
    def lesson_order(self) -> LessonOrder | None:
        """The lessons of an epoch; None if it has none."""
        return self.order if isinstance(self.order, LessonOrder) else None

    @property
    def longest_record(self) -> int:
        """Tokens of the longest record that is not left out."""
        return min(self.max_tokens, self.tokens_per_pack) if self.has_packs else self.max_tokens

    @property
    def limiting_key(self) -> str:
        """The key that sets `longest_record`."""
        return "batch.max_tokens" if self.longest_record == self.max_tokens else "batch.tokens_per_pack"
