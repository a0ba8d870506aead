"""The whole audit: what is in the files, what is wrong with it, and which images they share.

Design: one pass over the questions makes the counters, from which each kind of problem is found. Records, one small
tuple per question and one entry per image are kept in memory, some kilobytes for an image with nine questions; image
bytes are not.

A score on images that were trained on says little about other images. Files may ask the same questions; if they ask
them about the same images, that is a leak. Images are compared by content, so also under other names, and missing ones
by their paths.

The majority baseline needs no image, so only what a model scores above it may come from the images. It is learned on
the first file and scored on each other file. A single file is scored on itself, which is slightly too good; a question
that is asked only once then counts as unknown. An answer is right if it equals the reference, or one of several.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from lookonce.datasets.archives import find_archive
from lookonce.datasets.audit.corpus import Corpus, CorpusFile, QuestionAnswer, list_questions
from lookonce.datasets.audit.findings import (
    LEVELS,
    NUM_EXAMPLES,
    Finding,
    Item,
    Level,
    encodable,
    find_label_variants,
    find_misspellings,
    find_repeats,
    find_texts,
    findings_from,
)
from lookonce.datasets.images import ImageInfo, Size, Trait
from lookonce.datasets.majority import Majority
from lookonce.datasets.records import by_kind
from lookonce.text import count, one_line, quoted, share, shown


@dataclass(frozen=True)
class Side:
    """One of the two files, and how much of it is shared."""

    file: str
    num_images: int
    """Distinct images of the file."""
    images_share: float
    """The share of them that the other file has too."""
    num_questions: int
    """Questions about images that both files have."""
    questions_share: float


@dataclass(frozen=True)
class Leak:
    """What two files share."""

    one: Side
    other: Side
    num_images: int
    num_renamed: int
    """The number of shared images that have no file name in common."""
    num_asked_in_both: int
    """The number of questions that both files ask about the same images."""
    num_answered_otherwise: int
    """The number of these questions that have no answer in common."""
    images: tuple[Item, ...]

    def finding(self) -> Finding:
        one, other = self.one, self.other
        renamed = f", {self.num_renamed:,} of them under other names" if self.num_renamed else ""
        says = (
            f"{one.file} and {other.file} share {count(self.num_images, 'image')}{renamed}: {one.images_share:.1%} and "
            f"{other.images_share:.1%} of their images, {one.questions_share:.1%} and {other.questions_share:.1%} of "
            f"their questions; both ask {count(self.num_asked_in_both, 'question')} about the same images"
        )
        renamed_first = sorted(self.images, key=lambda item: item["one"] == item["other"])
        return Finding(
            "leaks",
            "error",
            self.num_images,
            says,
            tuple(map(_leak_example, renamed_first[:NUM_EXAMPLES])),
            self.images,
        )


def find_leaks(corpus: Corpus, questions: Sequence[QuestionAnswer]) -> list[Leak]:
    """Return what every two files share, for those that share images."""
    asked = {file.name: [one for one in questions if one.file == file.name] for file in corpus.files}
    names = {file.name: _names(corpus, file) for file in corpus.files}
    leaks = []
    for one, other in combinations(names, 2):
        shared = [image for image in names[one] if image in names[other]]
        if not shared:
            continue
        answers, others = _answers(asked[one]), _answers(asked[other])
        both = answers.keys() & others.keys()
        leak = Leak(
            one=_side(one, names[one], asked[one], {*shared}),
            other=_side(other, names[other], asked[other], {*shared}),
            num_images=len(shared),
            num_renamed=sum(names[one][image].isdisjoint(names[other][image]) for image in shared),
            num_asked_in_both=len(both),
            num_answered_otherwise=sum(answers[key].isdisjoint(others[key]) for key in both),
            images=tuple(
                {"image": image, "one": sorted(names[one][image]), "other": sorted(names[other][image])}
                for image in sorted(shared)
            ),
        )
        leaks.append(leak)
    return leaks


def _names(corpus: Corpus, file: CorpusFile) -> dict[str, set[str]]:
    """Return the names that a file has for each of its images."""
    found: dict[str, set[str]] = defaultdict(set)
    for image in {image for record in file.records for image in record.images}:
        found[corpus.identity(image)].add(image.name)
    return found


def _side(name: str, images: Mapping[str, set[str]], asked: list[QuestionAnswer], shared: set[str]) -> Side:
    num_questions = sum(not shared.isdisjoint(one.images) for one in asked)
    return Side(name, len(images), share(len(shared), len(images)), num_questions, share(num_questions, len(asked)))


def _leak_example(item: Item) -> str:
    one, other = shown(", ".join(item["one"])), shown(", ".join(item["other"]))
    return one if one == other else f"{one} is {other}"


def _answers(asked: Iterable[QuestionAnswer]) -> dict[object, set[str]]:
    found: dict[object, set[str]] = defaultdict(set)
    for one in asked:
        if one.images:
            found[one.images, one.question].update(one.accepted)
    return found


NUM_TOP = 10
"""A vocabulary lists this many answers of a question."""
MAX_QUESTIONS = 1000
"""The most questions whose answers are listed; in free text nearly every question is asked only once."""
MIN_ASKED = 20
"""A question must be asked this often before a constant answer is reported."""


@dataclass(frozen=True)
class Vocabulary:
    """The answers of one question."""

    question: str
    num_asked: int
    num_answers: int
    """The number of distinct answers."""
    top: tuple[tuple[str, int], ...]
    """The most frequent answers and how often each is given."""
    majority: str
    majority_share: float


@dataclass(frozen=True)
class Baseline:
    """The score of one file's most frequent answers on the questions of another file."""

    learned_on: str
    scored_on: str
    num_questions: int
    num_right: int
    exact_match: float

    def text(self) -> str:
        learned = "itself" if self.learned_on == self.scored_on else self.learned_on
        asked = count(self.num_questions, "question")
        return f"{self.exact_match:.1%} of {asked} of {self.scored_on}, learned on {learned}"


def count_answers(questions: Iterable[QuestionAnswer]) -> dict[str, Counter[str]]:
    """Count how often each answer is given to each question."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for one in questions:
        found[one.question][one.answer] += 1
    return found


def vocabularies(answers: Mapping[str, Counter[str]]) -> list[Vocabulary]:
    """List the answers of the questions asked most, most first."""
    found = []
    for question, counts in sorted(answers.items(), key=lambda pair: -pair[1].total())[:MAX_QUESTIONS]:
        top = tuple(counts.most_common(NUM_TOP))
        majority, number = top[0]
        found.append(Vocabulary(question, counts.total(), len(counts), top, majority, share(number, counts.total())))
    return found


def find_constants(answers: Mapping[str, Counter[str]]) -> list[Finding]:
    """Find questions that are asked often and always have the same answer."""
    items = [
        {"question": question, "answer": next(iter(counts)), "count": counts.total()}
        for question, counts in answers.items()
        if len(counts) == 1 and counts.total() >= MIN_ASKED
    ]
    return findings_from(
        "constant-answers",
        "note",
        items,
        f"{count(len(items), 'question')} with the same answer every time: nothing in the image decides it",
        lambda item: f"{quoted(item['question'])}: always {quoted(item['answer'])}, {item['count']:,} times",
    )


def baselines(files: Sequence[str], questions: Sequence[QuestionAnswer]) -> list[Baseline]:
    """Score the first file's most frequent answers on each other file, or on itself if it is the only one."""
    asked = {file: [one for one in questions if one.file == file] for file in files}
    majority = Majority(((one.question, one.answer) for one in asked[files[0]]), min_asked=1 if files[1:] else 2)
    found = []
    for file in files[1:] or files:
        are_right = [majority.answer(one.question).strip() in map(str.strip, one.accepted) for one in asked[file]]
        right, number = sum(are_right), len(are_right)
        found.append(Baseline(files[0], file, number, right, share(right, number)))
    return found


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
            "findings": [asdict(finding) for finding in self.findings],
            "leaks": [asdict(leak) for leak in self.leaks],
            "baselines": [asdict(baseline) for baseline in self.baselines],
            "questions": [asdict(vocabulary) for vocabulary in self.vocabulary],
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
    says = f"{count(coerced, 'answer')} read from numbers or booleans, as `lookonce data convert --coerce-answers` does"
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
