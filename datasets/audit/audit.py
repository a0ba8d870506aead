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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from lookonce.datasets.audit.findings import (
    LEVELS,
    NUM_EXAMPLES,
    Answers,
    Corpus,
    CorpusFile,
    Finding,
    Item,
    Level,
    QuestionAnswer,
    encodable,
    find_constants,
    find_image_problems,
    find_malformed,
    find_repeats,
    find_texts,
    list_questions,
)
from lookonce.datasets.balance import Majority
from lookonce.datasets.images import Size
from lookonce.text import count, share, shown


@dataclass(frozen=True)
class Leak:
    """What two files share."""

    file: str
    other: str
    num_images: int
    """Distinct images that both files have."""
    file_share: float
    """The share of the images of `file` that they are."""
    other_share: float
    num_renamed: int
    """The number of shared images that have no file name in common."""
    num_asked_in_both: int
    """The number of questions that both files ask about the same images."""
    images: tuple[Item, ...]
    """Each shared image: what identifies it (`image`), and its names in both files (`names`, `other_names`)."""

    def finding(self) -> Finding:
        renamed = f", {self.num_renamed:,} of them under other names" if self.num_renamed else ""
        says = (
            f"{self.file} and {self.other} share {count(self.num_images, 'image')}{renamed}: {self.file_share:.1%} and "
            f"{self.other_share:.1%} of their images; both ask {count(self.num_asked_in_both, 'question')} about the "
            "same images"
        )
        renamed_first = sorted(self.images, key=lambda item: item["names"] == item["other_names"])
        examples = tuple(map(_leak_example, renamed_first[:NUM_EXAMPLES]))
        return Finding("leaks", "error", self.num_images, says, examples, self.images)


def _leak_example(item: Item) -> str:
    names, other_names = shown(", ".join(item["names"])), shown(", ".join(item["other_names"]))
    return names if names == other_names else f"{names} is {other_names}"


def find_leaks(corpus: Corpus, questions: Sequence[QuestionAnswer]) -> list[Leak]:
    """What every two files share, of those that share images."""
    questions_in: dict[str, set[object]] = {file.name: set() for file in corpus.files}
    for question in questions:
        if question.images:
            questions_in[question.file].add((question.images, question.question))
    names_in = {file.name: _names(corpus, file) for file in corpus.files}
    leaks = []
    for file, other in combinations(names_in, 2):
        names, other_names = names_in[file], names_in[other]
        if shared := sorted(names.keys() & other_names.keys()):
            leak = Leak(
                file,
                other,
                len(shared),
                share(len(shared), len(names)),
                share(len(shared), len(other_names)),
                sum(names[image].isdisjoint(other_names[image]) for image in shared),
                len(questions_in[file] & questions_in[other]),
                tuple(
                    {"image": image, "names": sorted(names[image]), "other_names": sorted(other_names[image])}
                    for image in shared
                ),
            )
            leaks.append(leak)
    return leaks


def _names(corpus: Corpus, file: CorpusFile) -> dict[str, set[str]]:
    """The names that a file has for each of its images."""
    names: dict[str, set[str]] = defaultdict(set)
    for image in {image for record in file.records for image in record.images}:
        names[corpus.identity(image)].add(image.name)
    return names


NUM_TOP = 10
"""A vocabulary lists this many answers of a question."""
MAX_QUESTIONS = 1000
"""The most questions whose answers are listed; in free text nearly every question is asked only once."""


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
        number = count(self.num_questions, "question")
        return f"{self.exact_match:.1%} of {number} of {self.scored_on}, learned on {learned}"


def vocabularies(answers: Answers) -> list[Vocabulary]:
    """The answers of the questions asked most, most first."""
    listed = []
    for question, counts in sorted(answers.items(), key=lambda pair: -pair[1].total())[:MAX_QUESTIONS]:
        top = tuple(counts.most_common(NUM_TOP))
        majority, number = top[0]
        listed.append(Vocabulary(question, counts.total(), len(counts), top, majority, share(number, counts.total())))
    return listed


def baselines(files: Sequence[str], questions: Sequence[QuestionAnswer]) -> list[Baseline]:
    """Score the first file's most frequent answers on each other file, or on itself if it is the only one."""
    asked_in = {file: [question for question in questions if question.file == file] for file in files}
    training = ((question.question, question.answer) for question in asked_in[files[0]])
    majority = Majority(training, min_asked=1 if files[1:] else 2)
    scored = []
    for file in files[1:] or files:
        right = sum(
            majority.answer(question.question).strip() in map(str.strip, question.accepted)
            for question in asked_in[file]
        )
        number = len(asked_in[file])
        scored.append(Baseline(files[0], file, number, right, share(right, number)))
    return scored


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
    num_text_only: int
    num_several_images: int
    num_paths: int
    """Distinct image paths."""
    num_images: int
    """Distinct images among those that can be read."""
    num_unusable: int
    """Paths whose images are missing or cannot be decoded."""

    @classmethod
    def of(cls, file: CorpusFile, corpus: Corpus) -> FileCounts:
        """The numbers of a file."""
        records = file.records
        images = [corpus.images[path] for path in {image for record in records for image in record.images}]
        return cls(
            name=file.name,
            path=str(file.path),
            num_records=len(records),
            num_malformed=len(file.malformed),
            num_questions=sum(len(record.turns) for record in records),
            num_several_turns=sum(len(record.turns) > 1 for record in records),
            num_text_only=sum(not record.images for record in records),
            num_several_images=sum(len(record.images) > 1 for record in records),
            num_paths=len(images),
            num_images=len({image.key for image in images} - {""}),
            num_unusable=sum(bool(image.problem) for image in images),
        )


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    files: tuple[FileCounts, ...]
    num_images: int
    """Distinct images, over all files, among those that can be read."""
    num_questions: int
    num_distinct_questions: int
    findings: tuple[Finding, ...]
    """All findings, the most severe first."""
    leaks: tuple[Leak, ...]
    baselines: tuple[Baseline, ...]
    questions: tuple[Vocabulary, ...]
    questions_per_image: Mapping[int, int]
    """For each number of questions, how many images have it, over all files, also images that cannot be read."""
    image_sizes: Mapping[Size, int]
    """For each width and height, how many distinct images have it; unreadable images are not counted."""

    def count(self, level: Level) -> int:
        """The number of findings of a level."""
        return sum(finding.level == level for finding in self.findings)

    @property
    def num_named_images(self) -> int:
        """Images that are asked about: distinct ones that can be read, and the paths of those that cannot."""
        return sum(self.questions_per_image.values())

    def to_json(self) -> dict[str, Any]:
        """All of it in plain types; `lookonce data audit -h` explains the keys."""
        sizes = [{"width": width, "height": height, "images": n} for (width, height), n in self.image_sizes.items()]
        value: dict[str, Any] = encodable(asdict(self) | {"image_sizes": sizes})
        return value


def audit(corpus: Corpus, more: Iterable[Finding] = ()) -> Audit:
    """Audit records files and their images; `more` are findings from another module."""
    questions = list_questions(corpus)
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for question in questions:
        answers[question.question][question.answer] += 1
    leaks = find_leaks(corpus, questions)
    files = tuple(FileCounts.of(file, corpus) for file in corpus.files)
    findings = [
        *find_malformed(corpus),
        *find_image_problems(corpus),
        *(leak.finding() for leak in leaks),
        *find_repeats(questions),
        *find_texts(corpus, questions),
        *find_constants(answers),
        *more,
    ]
    per_image = Counter(image for question in questions for image in question.images)
    size_of = {info.key: info.size for info in corpus.images.values() if info.size}
    return Audit(
        files=files,
        num_images=len({info.key for info in corpus.images.values() if info.key}),
        num_questions=len(questions),
        num_distinct_questions=len(answers),
        findings=tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level))),
        leaks=tuple(leaks),
        baselines=tuple(baselines([file.name for file in corpus.files], questions)),
        questions=tuple(vocabularies(answers)),
        questions_per_image=dict(sorted(Counter(per_image.values()).items())),
        image_sizes=dict(Counter(size_of.values()).most_common()),
    )
