"""The whole audit: what is in the files, what is wrong with it, and which images they share.

Design: one pass over the questions makes the counters. Each kind of problem is found from these by its own module and
returned as `Finding`s, so that text, JSON and page show all kinds the same way. Records, one small tuple per question
and one entry per image are kept in memory, some kilobytes for an image with nine questions; image bytes are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lookonce.datasets.archives import find_archive
from lookonce.datasets.audit.corpus import Corpus, CorpusFile
from lookonce.datasets.audit.findings import LEVELS, NUM_EXAMPLES, Finding, Item, Level, encodable, findings_from
from lookonce.datasets.audit.image_info import ImageInfo
from lookonce.datasets.audit.labels import find_label_variants
from lookonce.datasets.audit.leaks import Leak, find_leaks
from lookonce.datasets.audit.questions import QuestionAnswer, list_questions
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
from lookonce.datasets.images import Size, Trait
from lookonce.datasets.malformed import by_kind
from lookonce.text import count, one_line

NUM_KINDS = 10
"""The text shows this many kinds of malformed records."""
TRAITS: dict[Trait, tuple[Level, str]] = {
    "alpha": ("warning", "with an alpha channel, which is dropped: transparent pixels show the colour that they have"),
    "transparent": ("warning", "with a transparent colour, which is painted white"),
    "deep": ("warning", "with more than 8 bits a channel; values above 255 become 255, so convert them first"),
    "animated": ("warning", "with several frames, of which only the first is used"),
    "cmyk": ("note", "in CMYK, converted to RGB without their colour profile"),
}
"""How severe each trait of images is, and what becomes of it."""


@dataclass(frozen=True)
class FileCounts:
    """The numbers of one file."""

    name: str
    path: str
    num_records: int
    """Records that can be read."""
    num_malformed: int
    num_questions: int
    num_several_turns: int
    """Records with several turns."""
    num_text_only: int
    """Records without an image."""
    num_several_images: int
    num_paths: int
    """Distinct image paths."""
    num_images: int
    """Distinct images among those that can be read."""
    num_unusable: int
    """Paths whose images are missing or cannot be decoded."""


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    files: tuple[FileCounts, ...]
    findings: tuple[Finding, ...]
    """All findings, the most severe first."""
    leaks: tuple[Leak, ...]
    baselines: tuple[Baseline, ...]
    vocabulary: tuple[Vocabulary, ...]
    num_distinct_questions: int
    num_images: int
    """Distinct images, over all files, among those that can be read."""
    questions_per_image: Mapping[int, int]
    """For each number of questions, how many images have it, over all files, also images that cannot be read."""
    sizes: Mapping[Size, int]
    """For each width and height, how many distinct images have it; unreadable images are not counted."""

    def with_findings(self, findings: Iterable[Finding]) -> Audit:
        """Return the audit with further findings."""
        return replace(self, findings=_sorted([*self.findings, *findings]))

    def count(self, level: Level) -> int:
        """Count the findings of a level."""
        return sum(finding.level == level for finding in self.findings)

    @property
    def num_named_images(self) -> int:
        """Images that are asked about: distinct ones that can be read, and the paths of those that cannot."""
        return sum(self.questions_per_image.values())

    @property
    def num_questions(self) -> int:
        return sum(file.num_questions for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return all of it in plain types; `lookonce data audit -h` explains the keys."""
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
        return {key: encodable(item) for key, item in value.items()}


def audit(corpus: Corpus) -> Audit:
    """Audit records files and their images."""
    questions = list_questions(corpus)
    answers = count_answers(questions)
    leaks = find_leaks(corpus, questions)
    findings = [
        *find_malformed(corpus),
        *find_image_problems(corpus),
        *(leak.finding() for leak in leaks),
        *find_repeats(questions),
        *find_texts(corpus, questions),
        *find_label_variants(answers),
        *find_misspellings({text: n.total() for text, n in answers.items()}, Counter(one.answer for one in questions)),
        *find_constants(answers),
    ]
    per_image = Counter(image for one in questions for image in one.images)
    used = {info.key: info.size for info in corpus.images.values() if info.size}
    return Audit(
        files=tuple(_count(file, corpus, questions) for file in corpus.files),
        findings=_sorted(findings),
        leaks=tuple(leaks),
        baselines=tuple(baselines([file.name for file in corpus.files], questions)),
        vocabulary=tuple(vocabularies(answers)),
        num_distinct_questions=len(answers),
        num_images=len({info.key for info in corpus.images.values() if info.key}),
        questions_per_image=dict(sorted(Counter(per_image.values()).items())),
        sizes=dict(Counter(used.values()).most_common()),
    )


def find_malformed(corpus: Corpus) -> list[Finding]:
    """Find records that cannot be read, and count the answers that were read though they are not text."""
    kinds = by_kind(one for file in corpus.files for one in file.malformed)
    number = sum(len(kind.places) for kind in kinds)
    items = [asdict(kind) | {"count": len(kind.places), "text": kind.text()} for kind in kinds]
    found = findings_from(
        "malformed",
        "error",
        items,
        f"{count(number, 'malformed record')}, which training refuses; `lookonce data clean` writes the others",
        lambda item: str(item["text"]),
        count=number,
        num_examples=NUM_KINDS,
    )
    notes = [{"note": file.note} for file in corpus.files if file.note]
    found += findings_from("columns", "note", notes, "columns of bytes are left out", lambda item: str(item["note"]))
    coerced = sum(file.num_coerced for file in corpus.files)
    says = f"{count(coerced, 'answer')} read from numbers or booleans, as `data.coerce_answers: true` does in a run"
    return found + ([Finding("coerced-answers", "note", coerced, says)] if coerced else [])


def find_image_problems(corpus: Corpus) -> list[Finding]:
    """Find images that are missing, broken, of an odd size or more than 8-bit RGB, and copies under other names."""
    images = _without_repeats(corpus.images.values())
    origins = _origins(corpus)

    def items(reason_of: Callable[[ImageInfo], str]) -> list[Item]:
        return [
            {"image": str(info.path), "place": origins[str(info.path)], "reason": reason}
            for info in images
            if (reason := reason_of(info))
        ]

    missing = items(lambda info: info.problem if info.is_missing else "")
    broken = items(lambda info: "" if info.is_missing else info.problem)
    odd = items(lambda info: info.oddity)
    copies = _copies(images)
    return [
        *findings_from(
            "images-missing",
            "error",
            missing,
            _missing(len(missing), len(images)),
            _example,
            num_examples=1 if len(missing) == len(images) else NUM_EXAMPLES,
        ),
        *findings_from("images-broken", "error", broken, f"{count(len(broken), 'image')} cannot be encoded", _example),
        *findings_from("images-odd", "warning", odd, f"{count(len(odd), 'image')} of an odd size", _example),
        *(finding for trait in TRAITS for finding in _with_trait(trait, items)),
        *findings_from(
            "copies",
            "note",
            copies,
            f"{count(len(copies), 'image')} with copies under other names; each is encoded once",
            lambda item: ", ".join(item["images"][:3]),
        ),
    ]


def _with_trait(trait: Trait, items: Callable[[Callable[[ImageInfo], str]], list[Item]]) -> list[Finding]:
    level, says = TRAITS[trait]
    found = items(lambda info: f"{info.format}, mode {info.mode}" if trait in info.traits else "")
    return findings_from(f"images-{trait}", level, found, f"{count(len(found), 'image')} {says}", _example)


def _missing(number: int, total: int) -> str:
    images = count(total, "image")
    what = f"none of {images} can be read" if number == total else f"{number:,} of {images} cannot be read"
    return f"{what}; `--image-root` names the folder that their paths are relative to"


def _example(item: Item) -> str:
    named = "" if one_line(item["image"]) in one_line(item["reason"]) else f"{item['image']}: "
    return f"{named}{item['reason']} ({item['place']})"


def _origins(corpus: Corpus) -> dict[str, str]:
    """Return where the first record with each image is."""
    found: dict[str, str] = {}
    for file in corpus.files:
        for record in file.records:
            for image in record.images:
                found.setdefault(str(image), file.origin(record))
    return found


def _without_repeats(images: Iterable[ImageInfo]) -> list[ImageInfo]:
    """The images, with one of the rows of a parquet file that repeat an image."""
    found: dict[tuple[Path, str], ImageInfo] = {}
    for info in images:
        archive = find_archive(info.path) if info.key else None
        table = archive if archive and archive.suffix.lower() == ".parquet" else None
        found.setdefault((table, info.key) if table else (info.path, ""), info)
    return list(found.values())


def _copies(images: Iterable[ImageInfo]) -> list[Item]:
    names: dict[str, list[str]] = {}
    for info in images:
        if info.num_bytes:
            names.setdefault(info.key, []).append(str(info.path))
    return [{"key": key, "images": sorted(paths)} for key, paths in names.items() if len(paths) > 1]


def _count(file: CorpusFile, corpus: Corpus, questions: Sequence[QuestionAnswer]) -> FileCounts:
    records = file.records
    paths = {image for record in records for image in record.images}
    return FileCounts(
        name=file.name,
        path=str(file.path),
        num_records=len(records),
        num_malformed=len(file.malformed),
        num_questions=sum(len(record.turns) for record in records),
        num_several_turns=sum(len(record.turns) > 1 for record in records),
        num_text_only=sum(not record.images for record in records),
        num_several_images=sum(len(record.images) > 1 for record in records),
        num_paths=len(paths),
        num_images=len({corpus.images[path].key for path in paths} - {""}),
        num_unusable=sum(bool(corpus.images[path].problem) for path in paths),
    )


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))
