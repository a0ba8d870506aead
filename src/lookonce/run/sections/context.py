"""The key `data.context` of the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from lookonce.datasets.context import ContextForm
from lookonce.run.sections.paths import Paths
from lookonce.settings import ByContent


def _as_word(value: object) -> object:
    """YAML reads the word true as a boolean."""
    return "true" if value is True else value


def _kind_of_answers(value: Any) -> str:
    return "true" if value in (True, "true") else "files"


Answers = Annotated[
    Annotated[Literal["true"], BeforeValidator(_as_word), Tag("true")] | Annotated[Paths, Tag("files")],
    Discriminator(_kind_of_answers),
]


class ContextSection(ContextForm):
    """Answers to earlier questions in the prompts of later ones."""

    answers: ByContent[Answers] = "true"
    """Whose answers they are in training and in the validation loss: `true` are those of the records; or predictions
    files with a model's own answers to the same questions, one path or a list."""

    @property
    def given(self) -> list[Path]:
        """The predictions files; none if the answers are true."""
        return [] if self.answers == "true" else self.answers
