"""The whole audit: what is in the files, what is wrong with it, and which images they share; as text and as a page.

Design: one pass over the questions makes the counters, from which each kind of problem is found. Records, one small
tuple per question and one entry per image are in memory, some kilobytes for an image with nine questions; image bytes
are not.

Two files leak if they share images, by content, or by path where images are missing. The majority baseline is learned
on the first file and scored on each other file. A single file is scored on itself, which is slightly too good; a
question that is asked only once then counts as unknown.

The page is templates/audit.html.jinja. Everything is in it: style sheet, plots as SVG, and as data: URLs a contact
sheet, images with a question each, drawn from a seed. 48 images take about a megabyte.
"""

from __future__ import annotations

import base64
import io
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from PIL import ImageOps

from lookonce import page
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
from lookonce.datasets.images import UNDECODABLE, Size, distinct, open_image, read_many
from lookonce.errors import ImageError
from lookonce.files import threaded_map
from lookonce.text import bars, binned, count, share, shown, table


@dataclass(frozen=True)
class Leak:
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
    num_images: int
    """Distinct images among those that can be read."""
    num_unusable: int
    """Paths whose images are missing or cannot be decoded."""

    @classmethod
    def of(cls, file: CorpusFile, corpus: Corpus) -> FileCounts:
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


NUM_QUESTIONS, NUM_SIZES, MAX_BARS = 25, 8, 20
"""The text lists this many questions, image sizes and bars of a histogram."""
NUM_DRAWN = 30
"""The page draws the answers of this many questions."""
NUM_IMAGES, SIDE = 48, 300
"""A contact sheet has this many images, whose longer side has this many pixels."""
BASELINE = "majority baseline (always each question's most frequent answer, without an image)"
RARE = ("malformed", "unusable", "no image", "several images")
"""Columns of the table of files that are often all zero."""


def to_text(audit: Audit, more: Sequence[str] = ()) -> str:
    """Return the whole audit for a terminal; `more` are further sections, shown before the histograms and tables."""
    parts = [
        summary(audit),
        table(*file_lines(audit)),
        _findings(audit.findings),
        *more,
        _per_image(audit),
        table(*size_lines(audit)) if audit.image_sizes else "",
        "\n".join([BASELINE, *(f"  {baseline.text()}" for baseline in audit.baselines)]) if audit.num_questions else "",
        _questions(audit),
    ]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


def summary(audit: Audit) -> str:
    """Return a sentence or two: how much there is, and how many findings of each level."""
    files = "" if len(audit.files) == 1 else f" in {count(len(audit.files), 'file')}"
    num_unread = audit.num_named_images - audit.num_images
    unread = f", {num_unread:,} of which cannot be read" if num_unread else ""
    images = f"{count(audit.num_named_images, 'image')}{unread}"
    return f"{count(audit.num_questions, 'question')} about {images}{files}. {verdict(audit)}"


def verdict(audit: Audit) -> str:
    numbers = [f"{count(audit.count(level), level)}" for level in LEVELS if audit.count(level)]
    if not numbers:
        return "No problems found."
    joined = " and ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers)
    return f"{joined}." + (" Fix the errors before training." if audit.count("error") else "")


def file_lines(audit: Audit) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return header and lines of a table of the files; columns of what is rare are left out if they are all zero."""
    columns = {
        "records": [file.num_records for file in audit.files],
        "malformed": [file.num_malformed for file in audit.files],
        "questions": [file.num_questions for file in audit.files],
        "image names": [file.num_paths for file in audit.files],
        "distinct": [file.num_images for file in audit.files],
        "unusable": [file.num_unusable for file in audit.files],
        "no image": [file.num_text_only for file in audit.files],
        "several images": [file.num_several_images for file in audit.files],
    }
    columns = {name: numbers for name, numbers in columns.items() if name not in RARE or any(numbers)}
    lines = zip(*columns.values(), strict=True)
    header = ("file", *columns)
    return header, [(file.name, *(f"{n:,}" for n in line)) for file, line in zip(audit.files, lines, strict=True)]


def _findings(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.says}")
        lines += [f"{'':<11}{example}" for example in finding.examples]
        if finding.num_more > 0:
            lines.append(f"{'':<11}and {finding.num_more:,} more")
    return "\n".join(lines)


def _per_image(audit: Audit) -> str:
    numbers = [(str(number), images) for number, images in audit.questions_per_image.items()]
    if not numbers:
        return ""
    mean = sum(n * images for n, images in audit.questions_per_image.items()) / audit.num_named_images
    if len(numbers) > MAX_BARS:
        numbers = binned(audit.questions_per_image, MAX_BARS)
    return f"questions per image ({mean:.1f} on average): number of images\n{bars(numbers)}"


def size_lines(audit: Audit, most: int = NUM_SIZES) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return header and lines of a table of the most frequent image sizes."""
    lines = [(f"{width} x {height}", f"{images:,}") for (width, height), images in audit.image_sizes.items()]
    if len(lines) > most:
        num_images = sum(list(audit.image_sizes.values())[most:])
        lines = [*lines[:most], (count(len(lines) - most, "other size"), f"{num_images:,}")]
    return ("image size", "images"), list(lines)


def _questions(audit: Audit) -> str:
    lines = [
        (
            shown(question.question, 72),
            f"{question.num_asked:,}",
            f"{question.num_answers:,}",
            shown(question.majority, 40),
            f"{question.majority_share:.1%}",
        )
        for question in repeated_questions(audit)[:NUM_QUESTIONS]
    ]
    more = audit.num_distinct_questions - len(lines)
    if not lines:
        return f"{count(more, 'question')} asked once each" if more else ""
    text = table(("question", "asked", "answers", "majority", "share"), lines)
    return f"{text}\nand {count(more, 'other question')}" if more else text


def repeated_questions(audit: Audit) -> list[Vocabulary]:
    """Return the questions that are asked more than once; the others have no majority."""
    return [question for question in audit.questions if question.num_asked > 1]


@dataclass(frozen=True)
class Thumbnail:
    name: str
    file: str
    question: str
    answer: str
    url: str


def draw_contact_sheet(corpus: Corpus, seed: int = 0, num_images: int = NUM_IMAGES) -> list[Thumbnail]:
    """Draw at most `num_images` distinct images from the seed; images that cannot be decoded are left out."""
    path_of = {key: info.path for key, info in distinct(corpus.images).items() if not info.problem}
    keys = sorted(path_of)
    rng = random.Random(f"sheet {seed}")
    chosen = rng.sample(keys, min(num_images, len(keys)))
    questions = _questions_about(corpus, set(chosen))
    small = small_jpegs(path_of[key] for key in chosen)
    return [
        Thumbnail(path_of[key].name, *rng.choice(questions[key]), data_url(small[path_of[key]]))
        for key in chosen
        if small[path_of[key]]
    ]


def small_jpegs(paths: Iterable[Path], side: int = SIDE) -> dict[Path, bytes]:
    """The images at some paths as JPEGs of at most `side` pixels; empty for those that cannot be read or decoded."""
    return dict(threaded_map(partial(_shrink, side=side), read_many(paths)))


def data_url(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def _questions_about(corpus: Corpus, keys: set[str]) -> dict[str, list[tuple[str, str, str]]]:
    """Return file, question and answer of all questions about each image."""
    about: dict[str, list[tuple[str, str, str]]] = {key: [] for key in keys}
    for file in corpus.files:
        for record in file.records:
            for key in {corpus.identity(image) for image in record.images} & keys:
                about[key] += [(file.name, turn.question, turn.answer) for turn in record.turns]
    return about


def _shrink(read: tuple[Path, bytes | ImageError], side: int) -> tuple[Path, bytes]:
    path, data = read
    if isinstance(data, ImageError):
        return path, b""
    try:
        with open_image(data) as image:
            image.draft("RGB", (side, side))
            small = ImageOps.exif_transpose(image).convert("RGB")
    except (*UNDECODABLE, MemoryError):
        return path, b""
    small.thumbnail((side, side))
    target = io.BytesIO()
    small.save(target, "JPEG", quality=78)
    return path, target.getvalue()


@dataclass(frozen=True)
class Section:
    """A section of the page from another module: some tables, and a histogram of how often each number occurs."""

    title: str
    text: str
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]] = ()
    counts: Mapping[int, int] | None = None
    x_name: str = ""
    y_name: str = ""


def to_page(audit: Audit, sections: Sequence[Section] = (), sheet: Sequence[Thumbnail] = ()) -> str:
    """Return the whole page; `sections` are shown before the answers."""

    def histogram(counts: Mapping[int, int], x_name: str, y_name: str) -> str:
        return page.to_svg(page.histogram(counts, x_name, y_name), f"{y_name} by {x_name}")

    sizes = f"{count(len(audit.image_sizes), 'image size')}: width and height"
    names = ", ".join(file.name for file in audit.files)
    return page.render(
        "audit.html.jinja",
        title=f"Audit of {names}",
        names=names,
        audit=audit,
        summary=summary(audit),
        files=file_lines(audit),
        sections=sections,
        repeated_questions=repeated_questions(audit)[:NUM_DRAWN],
        size_table=size_lines(audit),
        all_sizes=size_lines(audit, len(audit.image_sizes)),
        sizes=page.to_svg(page.points(audit.image_sizes, "width, pixels", "height, pixels"), sizes)
        if audit.image_sizes
        else "",
        histogram=histogram,
        sheet=sheet,
        footer="Made by lookonce data audit. Its --json has the same numbers and all items of each finding.",
    )
