"""Dataset definitions: one YAML file says where a dataset is, what its columns mean, how it is cleaned and split.

Every key is below, with its meaning and its default; `datasets/README.md` shows how to write one. The defaults are
those of a dataset with the columns `question`, `answer` and `image`.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from lookonce import settings
from lookonce.datasets.curriculum import Stage
from lookonce.datasets.formats.image_references import SUFFIXES
from lookonce.datasets.formats.record import ANSWER_NAMES, IMAGE_ID_NAMES, IMAGE_NAMES, QUESTION_NAMES
from lookonce.datasets.prepare.rows import PARTS, Policy, Rule, Text
from lookonce.errors import UsageError
from lookonce.hub import is_hub_name
from lookonce.settings import read_settings

FOLDER = Path(__file__).parents[1]
"""The folder with the definitions of known datasets."""
FIELD = re.compile(r"\{(\w+)\}")
"""The name of a column in a pattern."""
OWN_METADATA = ("img_id", "official_split", "references", "original", "val_id")
"""Metadata keys that `prepare` itself writes."""


def _is_relative(pattern: str) -> str:
    if pattern.startswith("/") or ".." in Path(pattern).parts:
        raise ValueError("must be a path below the source's folder, without `..`")
    return pattern


def _is_owner_and_name(name: str) -> str:
    if not is_hub_name(name):
        raise ValueError("must be the name of a dataset on the Hub, owner/name")
    return name


Names = Annotated[list[str], BeforeValidator(settings.as_list)]
"""One name or several; the first that the source has is used."""
Pattern = Annotated[str, AfterValidator(_is_relative)]
Patterns = Annotated[list[Pattern], BeforeValidator(settings.as_list)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(settings.Section):
    model_config = ConfigDict(coerce_numbers_to_str=True)


class HubSection(Section):
    id: Annotated[str, AfterValidator(_is_owner_and_name)]
    """The dataset's name on the Hub, owner/name."""
    revision: str | None = None
    """The commit to download; by default the current commit of `main`, which the report then names."""
    files: Patterns = ["*"]
    """Patterns of the files to download; `*` matches across folders."""


class ColumnsSection(Section):
    """The names of columns; of several, the first that the source has is used; by default the usual ones."""

    question: Names = [*QUESTION_NAMES]
    answer: Names = [*ANSWER_NAMES]
    image: Names = ["image", *IMAGE_NAMES]
    """The embedded image, or its file name. An http(s) URL is not opened: `images` says where the file is."""
    image_id: Names = [*IMAGE_ID_NAMES]
    """The dataset's name for the image: the file is named after it, and rows with the same name stay on one side."""
    split: Names = ["split"]
    """The official split of a row: train, val or test. Without this column, the file's name may say it."""
    metadata: dict[str, Names] = {}
    """Columns that records keep: the name in the record's metadata, and the column."""

    @model_validator(mode="after")
    def _names_are_free(self) -> ColumnsSection:
        taken = sorted(set(self.metadata) & set(OWN_METADATA))
        if taken:
            raise ValueError(f"metadata `{taken[0]}` is written by prepare itself; choose another name for the column")
        return self


class SharesSection(Section):
    """Shares of the images; train has the rest."""

    val: Share = 0.15
    test: Share = 0.15

    @model_validator(mode="after")
    def _shares_fit(self) -> SharesSection:
        if self.val + self.test > 1:
            raise ValueError(f"val and test are {self.val + self.test:g} together; at most 1, and train is the rest")
        return self


class SplitSection(Section):
    by: Literal["image", "official"] = "image"
    """`image`: drawn with the seed, no image on two sides. `official`: the dataset's own, even if it leaks."""
    seed: settings.Seed = 42
    shares: SharesSection = SharesSection()
    together: list[str] = []
    """Metadata keys: rows with the same value, such as a video or a patient, stay on one side."""


class SampleSection(Section):
    """Rows that a challenge scores, drawn as its scripts draw them: they are records of their own, without rules."""

    of: Literal["train", "val", "test"] = "test"
    """The part of the official split."""
    where: dict[str, Text] = {}
    """Metadata that the rows have."""
    seed: settings.Seed = 42
    """Seed of the order, which is that of `shuffle(seed=...)` of the library `datasets`."""
    num_rows: Annotated[int, Field(ge=1, le=settings.MAX_COUNT)]
    """How many rows are taken, the first in this order."""


class QuestionSection(Section):
    """Metadata of all rows with a question."""

    category: str | None = None
    stage: Stage | None = None


class Definition(Section):
    """A dataset definition."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    title: str = ""
    licence: str = "unknown"
    """The licence, printed whenever the dataset is prepared."""
    homepage: str = ""
    paper: str = ""
    counts: dict[str, Annotated[int, Field(ge=0, le=settings.MAX_COUNT)]] = {}
    """The publishers' numbers of `rows` and `images`; reported beside those found."""
    hub: HubSection | None = None
    files: Patterns = []
    """Patterns of the files with the rows, in a local folder; by default all files of one format."""
    columns: ColumnsSection = ColumnsSection()
    images: Patterns = [
        *("{image}", "images/{image}"),
        *(f"{folder}{{image_id}}.{suffix}" for suffix in SUFFIXES for folder in ("images/", "")),
    ]
    """Where the image of a row is if it is not embedded: tried in this order, in the source's folder.
    Names in braces are columns; `{image}` and `{image_id}` are those of `columns`."""
    rules: list[Rule] = []
    duplicates: Policy = "merge"
    """Rows with the same image and question but different answers become one record with all answers as references
    (merge), one record each (keep), or none (drop)."""
    split: SplitSection = SplitSection()
    samples: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")], SampleSection] = {}
    """Files of records besides the split, by their names without suffix."""
    questions: dict[Text, QuestionSection] = {}
    """Metadata of questions, by their text after the rules; a row's own metadata takes precedence."""

    @property
    def used_columns(self) -> set[str]:
        """The names of all columns that are used."""
        columns = self.columns
        of_rows = (columns.question, columns.answer, columns.image, columns.image_id, columns.split)
        return {*FIELD.findall(" ".join(self.images))}.union(*of_rows, *columns.metadata.values())

    @model_validator(mode="after")
    def _together_is_kept(self) -> Definition:
        together = self.split.together if self.split.by == "image" else []
        if lacking := sorted({*together} - self.columns.metadata.keys()):
            name = lacking[0]
            raise ValueError(
                f"split.together: no column is kept as {name}; add it, as in columns: {{metadata: {{{name}: {name}}}}}"
            )
        return self

    @model_validator(mode="after")
    def _samples_are_no_parts(self) -> Definition:
        if taken := sorted({*PARTS} & self.samples.keys()):
            raise ValueError(f"samples: {taken[0]}.jsonl is a part of the split; choose another name")
        return self

    @model_validator(mode="after")
    def _rule_names_are_unique(self) -> Definition:
        numbers = Counter(rule.name for rule in self.rules)
        double = sorted(name for name, number in numbers.items() if number > 1)
        if double:
            raise ValueError(
                f"two rules are called `{double[0]}`; reports identify rules by name, so give each its own"
            )
        return self


def known_datasets() -> list[str]:
    """The names of the dataset definitions that come with lookonce."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_definition(name: str) -> Definition:
    """The definition of a known dataset, or that in a YAML file; raises UsageError, which names all its mistakes."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return read_definition(path)
    if name not in known_datasets():
        close = difflib.get_close_matches(name, known_datasets(), n=1)
        hint = f"did you mean `{close[0]}`? " if close else ""
        raise UsageError(
            f"no known dataset is called {name!r}; {hint}known are {', '.join(known_datasets())}, or name "
            "a YAML file of your own (datasets/README.md says how to write one)"
        )
    return read_definition(FOLDER / f"{name}.yaml")


def read_definition(path: Path) -> Definition:
    """Read one YAML file; raises UsageError if it is missing or not YAML, or a key or value is wrong."""
    hint = f"known datasets are {', '.join(known_datasets())}"
    return read_settings(path, Definition, str(path), hint, f"keys and values, at least `name: {path.stem}`")
