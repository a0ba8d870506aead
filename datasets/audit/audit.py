"""All of an audit together: what is in the files, what is wrong with it, what leaks.

Design: one pass over the questions makes the counters; each kind of trouble is found from these by its own module and
comes as `Finding`s, so text, JSON and page print all kinds alike. Records, one small tuple a question and one entry an
image are in memory, some kilobytes an image with nine questions; the images' bytes are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lookonce.datasets.audit.corpus import Material, RecordsFile
from lookonce.datasets.audit.findings import LEVELS, NUM_EXAMPLES, Finding, Item, Level, find, valid
from lookonce.datasets.audit.labels import find_label_variants
from lookonce.datasets.audit.leaks import Leak, find_leaks
from lookonce.datasets.audit.pictures import Picture
from lookonce.datasets.audit.questions import Asked, asked
from lookonce.datasets.audit.repeats import find_repeats
from lookonce.datasets.audit.spelling import find_misspellings
from lookonce.datasets.audit.texts import find_texts
from lookonce.datasets.audit.vocabulary import (
    Baseline,
    Vocabulary,
    baselines,
    count_answers,
    find_constants,
    vocabularies,
)
from lookonce.datasets.images import Size
from lookonce.text import count


@dataclass(frozen=True)
class FileCounts:
    """How much is in one file."""

    name: str
    path: str
    num_records: int
    num_questions: int
    num_several_turns: int
    """Records of more than one question."""
    num_text_only: int
    """Records without an image."""
    num_several_images: int
    num_paths: int
    """Images by name."""
    num_images: int
    """Images by content."""
    num_unusable: int
    """Names without an image that can be used."""


@dataclass(frozen=True)
class Audit:
    """What is in some files of records."""

    files: tuple[FileCounts, ...]
    findings: tuple[Finding, ...]
    """Errors first."""
    leaks: tuple[Leak, ...]
    baselines: tuple[Baseline, ...]
    vocabulary: tuple[Vocabulary, ...]
    num_distinct_questions: int
    questions_per_image: Mapping[int, int]
    """How many images have so many questions, over all files."""
    sizes: Mapping[Size, int]
    """How many distinct images are so wide and high; those that can be read."""

    def with_findings(self, findings: Iterable[Finding]) -> Audit:
        """With what others have found besides."""
        return replace(self, findings=_sorted([*self.findings, *findings]))

    def count(self, level: Level) -> int:
        """How many findings are as bad as that."""
        return sum(finding.level == level for finding in self.findings)

    @property
    def num_images(self) -> int:
        """Distinct ones, over all files."""
        return sum(self.questions_per_image.values())

    @property
    def num_questions(self) -> int:
        return sum(file.num_questions for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """All of it in plain types; `lookonce data audit -h` says what the keys are."""
        value = {
            "files": [asdict(file) for file in self.files],
            "num_images": self.num_images,
            "num_questions": self.num_questions,
            "num_distinct_questions": self.num_distinct_questions,
            "findings": [finding.to_json() for finding in self.findings],
            "leaks": [leak.to_json() for leak in self.leaks],
            "baselines": [baseline.to_json() for baseline in self.baselines],
            "questions": [vocabulary.to_json() for vocabulary in self.vocabulary],
            "questions_per_image": {str(number): images for number, images in self.questions_per_image.items()},
            "image_sizes": [
                {"width": width, "height": height, "images": images} for (width, height), images in self.sizes.items()
            ],
        }
        return {key: valid(item) for key, item in value.items()}


def audit(material: Material) -> Audit:
    """Look at everything."""
    questions = asked(material)
    answers = count_answers(questions)
    leaks = find_leaks(material, questions)
    findings = [
        *find_picture_problems(material),
        *(leak.finding() for leak in leaks),
        *find_repeats(questions),
        *find_texts(questions),
        *find_label_variants(answers),
        *find_misspellings({text: n.total() for text, n in answers.items()}, Counter(one.answer for one in questions)),
        *find_constants(answers),
    ]
    per_image = Counter(image for one in questions for image in one.images)
    used = {picture.key: picture.size for picture in material.pictures.values() if picture.size}
    return Audit(
        files=tuple(_count(file, material, questions) for file in material.files),
        findings=_sorted(findings),
        leaks=tuple(leaks),
        baselines=tuple(baselines([file.name for file in material.files], questions)),
        vocabulary=tuple(vocabularies(answers)),
        num_distinct_questions=len(answers),
        questions_per_image=dict(sorted(Counter(per_image.values()).items())),
        sizes=dict(Counter(used.values()).most_common()),
    )


def find_picture_problems(material: Material) -> list[Finding]:
    """Images that are missing, broken or strange, and copies under other names."""
    pictures = material.pictures.values()
    places = _places(material)

    def items(chosen: Iterable[Picture], reason: str = "problem") -> list[Item]:
        return [
            {"image": str(picture.path), "place": places[str(picture.path)], "reason": getattr(picture, reason)}
            for picture in chosen
        ]

    missing = items(picture for picture in pictures if picture.is_missing)
    broken = items(picture for picture in pictures if picture.problem and not picture.is_missing)
    odd = items((picture for picture in pictures if picture.oddity), "oddity")
    copies = _copies(pictures)
    return [
        *find(
            "images-missing",
            "error",
            missing,
            _says_missing(len(missing), len(pictures)),
            _example,
            num_examples=1 if len(missing) == len(pictures) else NUM_EXAMPLES,
        ),
        *find("images-broken", "error", broken, f"{count(len(broken), 'image')} can not be decoded", _example),
        *find("images-odd", "warning", odd, f"{count(len(odd), 'image')} of a strange size", _example),
        *find(
            "copies",
            "note",
            copies,
            f"{count(len(copies), 'image')} there more than once under other names; each is encoded once",
            lambda item: ", ".join(item["images"][:3]),
        ),
    ]


def _says_missing(number: int, of: int) -> str:
    which = f"none of {count(of, 'image')}" if number == of else f"{number:,} of {count(of, 'image')} can not be"
    return f"{which} {'can be read' if number == of else 'read'}; `--image-root` says what their paths are relative to"


def _example(item: Item) -> str:
    named = "" if item["image"] in item["reason"] else f"{item['image']}: "
    return f"{named}{item['reason']} ({item['place']})"


def _places(material: Material) -> dict[str, str]:
    """The first record that names each image."""
    found: dict[str, str] = {}
    for file in material.files:
        for record in file.records:
            for image in record.images:
                found.setdefault(str(image), file.place(record))
    return found


def _copies(pictures: Iterable[Picture]) -> list[Item]:
    names: dict[str, list[str]] = {}
    for picture in pictures:
        if picture.num_bytes:
            names.setdefault(picture.key, []).append(str(picture.path))
    return [{"key": key, "images": sorted(paths)} for key, paths in names.items() if len(paths) > 1]


def _count(file: RecordsFile, material: Material, questions: Sequence[Asked]) -> FileCounts:
    records = file.records
    paths = {image for record in records for image in record.images}
    return FileCounts(
        name=file.name,
        path=str(file.path),
        num_records=len(records),
        num_questions=sum(len(record.turns) for record in records),
        num_several_turns=sum(len(record.turns) > 1 for record in records),
        num_text_only=sum(not record.images for record in records),
        num_several_images=sum(len(record.images) > 1 for record in records),
        num_paths=len(paths),
        num_images=len({material.identity(path) for path in paths}),
        num_unusable=sum(bool(material.pictures[path].problem) for path in paths),
    )


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))
