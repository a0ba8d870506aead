"""What a set is: one YAML file that says where it lies, what its columns mean, how it is cleaned and split.

Every key that such a file can have is below, with its meaning and its default; `datasets/README.md` shows how one is
written. Unknown keys are refused, so that a misspelt one can not be silently ignored. What is left out of a file has
the defaults of a set of `question`, `answer` and `image`.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lookonce.datasets.prepare.duplicates import Policy
from lookonce.datasets.prepare.rules import Rule
from lookonce.errors import UsageError
from lookonce.settings import read_settings

FOLDER = Path(__file__).parents[1]
"""Holds the known sets."""
FIELD = re.compile(r"\{(\w+)\}")
"""A column's name in a pattern."""
OWN_METADATA = ("img_id", "official_split", "variant", "references", "original")
"""What `prepare` itself writes into metadata."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_relative(pattern: str) -> str:
    if pattern.startswith("/") or ".." in Path(pattern).parts:
        raise ValueError("must lead downwards from the source's folder")
    return pattern


Names = Annotated[list[str], BeforeValidator(_as_list)]
"""One or several; the first that is there counts."""
Pattern = Annotated[str, AfterValidator(_is_relative)]
Patterns = Annotated[list[Pattern], BeforeValidator(_as_list)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class HubSection(Section):
    id: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """Of the data set, owner/name."""
    revision: str | None = None
    """The commit that is downloaded; by default what `main` is now, which the report then names."""
    files: Patterns = ["*"]
    """Which of its files; `*` goes over folders."""


class ColumnsSection(Section):
    """The names of columns; where several are given, the first that a source has."""

    question: Names = ["question"]
    answer: Names = ["answer"]
    image: Names = ["image"]
    """The embedded image, or its file name. An http(s) URL is not followed: `images` says where the file is."""
    image_id: Names = ["img_id", "image_id"]
    """What the set calls the image: its file is named so, and rows that call it so stay in one part of a split."""
    split: Names = ["split"]
    """The part that the set puts a row into; without such a column its file's name says it, if anything does."""
    metadata: dict[str, Names] = {}
    """What else a record keeps: its name there, and the column."""

    @model_validator(mode="after")
    def _names_are_free(self) -> ColumnsSection:
        taken = sorted(set(self.metadata) & set(OWN_METADATA))
        if taken:
            raise ValueError(f"metadata `{taken[0]}` is written by prepare itself; give the column another name there")
        return self


class TextSection(Section):
    """A set of text files, a line a question: `question|answer`."""

    files: Pattern
    """Where they are; `{sequence}` stands for a folder or a part of a name, and becomes a column."""
    image: Pattern
    """Where the image of such a file is, by the same names."""
    image_id: str = ""
    """What to call that image, by the same names."""
    separator: Annotated[str, Field(min_length=1)] = "|"


class OfficialSection(Section):
    """The set's own split, where a column of metadata says it and not a file's name or a column `split`."""

    column: str
    train: list[str] = []
    val: list[str] = []
    test: list[str] = []


class SharesSection(Section):
    """Of images; train has the rest."""

    val: Share = 0.15
    test: Share = 0.15

    @model_validator(mode="after")
    def _something_is_left(self) -> SharesSection:
        if self.val + self.test > 1:
            raise ValueError(f"val and test are {self.val + self.test:g} together; at most 1, train is what is left")
        return self


class SplitSection(Section):
    by: Literal["image", "official"] = "image"
    """`image`: drawn by the seed, no image on two sides. `official`: the set's own, whatever leaks."""
    seed: int = 42
    shares: SharesSection = SharesSection()
    together: list[str] = []
    """Metadata whose rows stay on one side, for example of a video or of a patient."""
    official: OfficialSection | None = None


class QuestionSection(Section):
    """What is known of a question's text; a row's own metadata goes first."""

    category: str | None = None
    stage: int | None = None


class Definition(Section):
    """A whole set."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    title: str = ""
    licence: str = "unknown"
    """Shown whenever the set is prepared."""
    homepage: str = ""
    paper: str = ""
    counts: dict[str, int] = {}
    """What the publishers say is in it: `rows`, `images`; told beside what was found."""
    hub: HubSection | None = None
    files: Patterns = []
    """Of a local folder those with the rows; by default all of one kind."""
    columns: ColumnsSection = ColumnsSection()
    images: Patterns = ["{image}", "images/{image}", "images/{image_id}.jpg", "{image_id}.jpg"]
    """Where the image of a row is that is not embedded: tried in this order, in the source's folder and its zip files.
    Names of columns stand in braces; `{image}` and `{image_id}` are those of `columns`."""
    variants: Patterns = []
    """Where the transformed variants of an image are; `{variant}` is 1, 2 and so on."""
    text: TextSection | None = None
    rules: list[Rule] = []
    duplicates: Policy = "merge"
    """Of rows that ask the same of the same image with other answers: one record with all answers as references, a
    record each, or none of them."""
    split: SplitSection = SplitSection()
    questions: dict[str, QuestionSection] = {}
    """By the question's text, as it is after the rules."""

    @property
    def used_columns(self) -> set[str]:
        """The names of all columns that become something."""
        columns = self.columns
        names = [columns.question, columns.answer, columns.image, columns.image_id, columns.split]
        patterns = " ".join([*self.images, *self.variants])
        return {name for some in [*names, *columns.metadata.values()] for name in some} | set(FIELD.findall(patterns))

    @model_validator(mode="after")
    def _rules_have_names_of_their_own(self) -> Definition:
        names = [rule.name for rule in self.rules]
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ValueError(f"two rules are called `{double[0]}`; reports tell rules by their names")
        return self


def known_sets() -> list[str]:
    """The names of the definitions that come with lookonce."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_definition(name: str) -> Definition:
    """The definition of a known set, or of a YAML file at a path.

    Raises:
        UsageError: there is none, or something in it is wrong; all that is wrong is named at once.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return read_definition(path)
    if name not in known_sets():
        close = difflib.get_close_matches(name, known_sets(), n=1)
        hint = f"did you mean `{close[0]}`? " if close else ""
        raise UsageError(
            f"no set is called {name!r}; {hint}known are {', '.join(known_sets())}, or name a YAML file of your own "
            "(datasets/README.md says what goes into it)"
        )
    return read_definition(FOLDER / f"{name}.yaml")


def read_definition(path: Path) -> Definition:
    """Read one YAML file.

    Raises:
        UsageError: it is missing, no YAML, or a key or value is wrong.
    """
    hint, expected = f"known sets are {', '.join(known_sets())}", f"keys and values, at least `name: {path.stem}`"
    return read_settings(path, Definition, str(path), hint, expected)
