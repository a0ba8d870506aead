"""What an audit finds wrong, or worth knowing: each problem of records, images and texts by its own function.

A finding is one problem: how severe it is, how often it occurs, and where. An `error` spoils a training or its scores,
or stops it; a `warning` is dirt that a model would learn; a `note` is worth knowing. `items` are complete and for
programs, `examples` are the first few and for people.

Two questions are the same if they have the same images, by content, in the same order, the same text before them
(system text and earlier turns) and the same words, in NFC. The text before a question is a hash that each turn
continues, so memory grows with the number of turns and not with its square.

Two answers agree if they have a correct answer in common; case, spaces and the order of labels, which `;` separates, do
not count. If all answers to the same question about the same image agree, the question is a duplicate. If not, it is a
contradiction: a model cannot learn both answers, and no score of such a question is right.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from lookonce.datasets.archives import find_archive
from lookonce.datasets.formats.image_references import MARKUP
from lookonce.datasets.images import ImageInfo, Trait, inspect_images
from lookonce.datasets.records import Collector, Malformed, Record, RecordsFile, by_kind
from lookonce.errors import UsageError
from lookonce.text import count, nfc, one_line, quoted, short_ends, shown

TRAIN = "train"
"""The file whose name begins with this is the one that is trained on."""


@dataclass(frozen=True)
class CorpusFile:
    name: str
    """The last parts of the path, as many as tell it from the other files."""
    path: Path
    records: Sequence[Record]
    malformed: Sequence[Malformed] = ()
    note: str = ""

    @classmethod
    def read(cls, name: str, path: Path, image_root: Path | None) -> CorpusFile:
        """Read a file; malformed records are kept aside. Raises RecordsError if it is missing, or no text."""
        malformed = Collector()
        file = RecordsFile(path, image_root, broken=malformed)
        records = list(file)
        named = [record._replace(place=name + record.place.removeprefix(str(path))) for record in malformed]
        return cls(name, path, records, named, file.note())

    def origin(self, record: Record) -> str:
        """Return where the record is, with the short name of the file: "train.jsonl:12"."""
        return self.name + record.origin.removeprefix(str(self.path))


@dataclass(frozen=True)
class Corpus:
    files: tuple[CorpusFile, ...]
    """The first is the one that is trained on: the one named `train...`, else the first that was given."""
    images: Mapping[Path, ImageInfo]

    @classmethod
    def read(cls, paths: Sequence[Path], image_root: Path | None = None, *, decode: bool = False) -> Corpus:
        """Read the files, and inspect every image once.

        Raises:
            RecordsError: a file is missing, or cannot be read as text.
            UsageError: a file is given twice.
        """
        twice = [path for number, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:number]}]
        if twice:
            raise UsageError(f"{twice[0]} is given twice; give each records file once")
        paths = sorted(paths, key=lambda path: not path.name.startswith(TRAIN))
        names = short_ends(paths)
        files = [CorpusFile.read(name, path, image_root) for name, path in zip(names, paths, strict=True)]
        images = {image for file in files for record in file.records for image in record.images}
        return cls(tuple(files), inspect_images(images, decode=decode))

    def identity(self, image: Path) -> str:
        """Return what identifies an image: its key, or its path if the image cannot be read."""
        return self.images[image].key or f"path:{image!s}"


class QuestionAnswer(NamedTuple):
    file: str
    origin: str
    """Where its record is: "train.jsonl:12"."""
    images: tuple[str, ...]
    """What identifies the images; see `Corpus.identity`."""
    image_names: str
    """The names of the images' files, for messages."""
    before: int
    """The hash of the system text and the earlier turns."""
    question: str
    answer: str
    references: tuple[str, ...] = ()
    """All correct answers, if the record has several."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """All correct answers, `answer` first."""
        return tuple(dict.fromkeys((self.answer, *self.references)))


def list_questions(corpus: Corpus) -> list[QuestionAnswer]:
    return [pair for file in corpus.files for record in file.records for pair in _of_record(file, record, corpus)]


def _of_record(file: CorpusFile, record: Record, corpus: Corpus) -> Iterator[QuestionAnswer]:
    images, origin = tuple(map(corpus.identity, record.images)), file.origin(record)
    names = ", ".join(image.name for image in record.images) or "no image"
    references = tuple(map(nfc, record.references))
    before = _hash(0, repr(record.system and nfc(record.system)))
    for turn in (turn.in_nfc for turn in record.turns):
        yield QuestionAnswer(file.name, origin, images, names, before, turn.question, turn.answer, references)
        before = _hash(before, repr((turn.question, turn.answer)))


def _hash(before: int, text: str) -> int:
    """The hash of a text after what has the hash `before`."""
    return int(xxhash.xxh3_128_intdigest(f"{before} {text}".encode()))


Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
"""All levels, the most severe first."""
NUM_EXAMPLES = 3
NUM_KINDS = 10
"""The text shows this many kinds of malformed records."""
MIN_SIDE = 32
"""Smaller images are odd: 32 pixels are the side of one visual token of Qwen3-VL."""
MIN_ASKED = 20
"""A question must be asked this often before a constant answer is reported."""

Item = dict[str, Any]
"""One occurrence of a problem, in plain types for JSON."""
Answers = Mapping[str, Counter[str]]
"""For each question, how often each answer is given."""


@dataclass(frozen=True)
class Finding:
    code: str
    """The name of the problem; it does not change from version to version."""
    level: Level
    count: int
    says: str
    """One sentence with the number, without its full stop."""
    examples: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()

    @property
    def num_more(self) -> int:
        return len(self.items) - len(self.examples)


def findings_from(
    code: str,
    level: Level,
    items: Sequence[Item],
    says: str,
    example: Callable[[Item], str],
    *,
    count: int | None = None,
    num_examples: int = NUM_EXAMPLES,
) -> list[Finding]:
    """One finding with its first few items as examples, or none if there are no items."""
    if not items:
        return []
    examples = tuple(one_line(example(item)) for item in items[:num_examples])
    return [Finding(code, level, len(items) if count is None else count, says, examples, tuple(items))]


def encodable(value: Any) -> Any:
    """A plain value with all lone surrogates in its texts escaped, which UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, list | tuple) else value


def find_malformed(corpus: Corpus) -> list[Finding]:
    """Find records that cannot be read, and columns that are not."""
    kinds = by_kind(malformed for file in corpus.files for malformed in file.malformed)
    number = sum(len(kind.places) for kind in kinds)
    items = [asdict(kind) | {"count": len(kind.places), "text": kind.text()} for kind in kinds]
    notes = [{"note": file.note} for file in corpus.files if file.note]
    return [
        *findings_from(
            "malformed",
            "error",
            items,
            f"{count(number, 'malformed record')}, which training refuses",
            lambda item: str(item["text"]),
            count=number,
            num_examples=NUM_KINDS,
        ),
        *findings_from("columns", "note", notes, "columns of bytes are left out", lambda item: str(item["note"])),
    ]


TRAITS: dict[Trait, tuple[Level, str]] = {
    "alpha": ("warning", "with an alpha channel, which is dropped: transparent pixels show the colour that they have"),
    "transparent": ("warning", "with a transparent colour, which is painted white"),
    "deep": ("warning", "with more than 8 bits a channel; values above 255 become 255, so convert them first"),
    "animated": ("warning", "with several frames, of which only the first is used"),
    "cmyk": ("note", "in CMYK, converted to RGB without their colour profile"),
}
"""How severe each trait of images is, and what becomes of it."""


def find_image_problems(corpus: Corpus) -> list[Finding]:
    """Find images that are missing, broken, of an odd size or more than 8-bit RGB, and copies under other names."""
    images = _without_repeats(corpus.images.values())
    origins: dict[Path, str] = {}
    for file in corpus.files:
        for record in file.records:
            for path in record.images:
                origins.setdefault(path, file.origin(record))

    def items(reason_of: Callable[[ImageInfo], str]) -> list[Item]:
        return [
            {"image": str(info.path), "place": origins[info.path], "reason": reason}
            for info in images
            if (reason := reason_of(info))
        ]

    def find(code: str, level: Level, says: str, reason_of: Callable[[ImageInfo], str]) -> list[Finding]:
        problems = items(reason_of)
        return findings_from(
            f"images-{code}", level, problems, f"{count(len(problems), 'image')} {says}", _image_example
        )

    missing = items(lambda info: info.problem if info.is_missing else "")
    are_all = len(missing) == len(images)
    names: dict[str, list[str]] = {}
    for info in images:
        if info.num_bytes:
            names.setdefault(info.key, []).append(str(info.path))
    copies = [{"key": key, "images": sorted(paths)} for key, paths in names.items() if len(paths) > 1]
    return [
        *findings_from(
            "images-missing",
            "error",
            missing,
            f"{len(missing):,} of {count(len(images), 'image')} cannot be read; `--image-root` names the folder that "
            "their paths are relative to",
            _image_example,
            num_examples=1 if are_all else NUM_EXAMPLES,
        ),
        *find("broken", "error", "cannot be encoded", lambda info: "" if info.is_missing else info.problem),
        *find("odd", "warning", "of an odd size", _oddity),
        *(
            finding
            for trait, (level, says) in TRAITS.items()
            for finding in find(trait, level, says, partial(_trait_note, trait))
        ),
        *findings_from(
            "copies",
            "note",
            copies,
            f"{count(len(copies), 'image')} with copies under other names; each is encoded once",
            lambda item: ", ".join(item["images"][:3]),
        ),
    ]


def _oddity(info: ImageInfo) -> str:
    width, height = info.size or (MIN_SIDE, MIN_SIDE)
    is_odd = min(width, height) < MIN_SIDE
    return f"{width} x {height} pixels, less than {MIN_SIDE} on a side" if is_odd else ""


def _trait_note(trait: Trait, info: ImageInfo) -> str:
    header = info.header
    return f"{header.format}, mode {header.mode}" if header and trait in header.traits else ""


def _image_example(item: Item) -> str:
    named = "" if one_line(item["image"]) in one_line(item["reason"]) else f"{item['image']}: "
    return f"{named}{item['reason']} ({item['place']})"


def _without_repeats(images: Iterable[ImageInfo]) -> list[ImageInfo]:
    """The images, with one of the rows of a parquet file that repeat an image."""
    distinct: dict[tuple[Path, str], ImageInfo] = {}
    for info in images:
        archive = find_archive(info.path) if info.key else None
        table = archive if archive and archive.suffix.lower() == ".parquet" else None
        distinct.setdefault((table, info.key) if table else (info.path, ""), info)
    return list(distinct.values())


MISSING = {"nan", "null", "n/a", "#n/a", "<na>", "nat", "undefined"}
"""Missing values written as text. "none" and "na" are not among them, since they may be answers."""
NO_QUESTION = MISSING | {"none", "na"}
SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
IMAGE_TAG = re.compile(rf"<(?:image|video|audio)>|{MARKUP}", re.IGNORECASE)
"""Tags that other trainers replace with an image, and images in HTML and Markdown; here they would be text."""


def find_texts(corpus: Corpus, questions: Sequence[QuestionAnswer]) -> list[Finding]:
    missing = [(_missing(pair), pair.origin) for pair in questions]
    spaces = ((pair.answer, pair.origin) for pair in questions if pair.answer != pair.answer.strip())
    short = (
        (pair.question, pair.origin) for pair in questions if len(pair.question.split()) < 2 and not _missing(pair)
    )
    empty = ((pair.answer, pair.origin) for pair in questions if not any(map(str.isalnum, pair.answer)))
    return [
        *_find("answer-spaces", "with spaces or line breaks around the answer, which models learn", spaces),
        *_find("missing-values", "with a missing value written as text", missing),
        *_find("short-questions", "of fewer than two words", short),
        *_find("empty-answers", "with an answer without a letter or a digit", empty),
        *_find(
            "special-tokens",
            "with what looks like a special token of another model",
            _texts_with(SPECIAL_TOKEN, corpus),
        ),
        *_find(
            "image-marks", "with an image tag in its text, which would be read as text", _texts_with(IMAGE_TAG, corpus)
        ),
    ]


def _texts_with(mark: re.Pattern[str], corpus: Corpus) -> Iterator[tuple[str, str]]:
    """The texts with a mark and their places; a question that has it twice counts once."""
    for file in corpus.files:
        for record in file.records:
            origin, system = file.origin(record), record.system or ""
            for turn in record.turns:
                if text := next((text for text in (turn.question, turn.answer, system) if mark.search(text)), ""):
                    yield text, origin
                system = ""


def _find(code: str, says: str, texts: Iterable[tuple[str, str]]) -> list[Finding]:
    """Make an item of each distinct text, the most frequent first, with all places where it occurs."""
    places_of: dict[str, list[str]] = defaultdict(list)
    for text, origin in texts:
        if text:
            places_of[text].append(origin)
    most_first = sorted(places_of.items(), key=lambda pair: -len(pair[1]))
    items: list[Item] = [{"text": text, "count": len(places), "places": places} for text, places in most_first]
    number = sum(map(len, places_of.values()))
    return findings_from(code, "warning", items, f"{count(number, 'question')} {says}", _text_example, count=number)


def _text_example(item: Item) -> str:
    more = f" and {item['count'] - 1:,} more" if item["count"] > 1 else ""
    return f"{quoted(item['text'])} ({item['places'][0]}{more})"


def _missing(pair: QuestionAnswer) -> str:
    question, answer = pair.question.strip().casefold(), pair.answer.strip().casefold()
    return f"{pair.question} {pair.answer}" if question in NO_QUESTION or answer in MISSING else ""


def normal_labels(answer: str) -> tuple[str, ...]:
    """The labels of an answer, equal for answers that differ only in case, spaces, order or a final full stop."""
    labels = (" ".join(label.split()) for label in answer.casefold().rstrip(".; ").split(";"))
    return tuple(sorted(set(labels)))


def find_repeats(questions: Iterable[QuestionAnswer]) -> list[Finding]:
    groups: dict[object, list[QuestionAnswer]] = defaultdict(list)
    for question in questions:
        groups[question.file, question.images, question.before, question.question].append(question)
    duplicates: list[Item] = []
    contradictions: list[Item] = []
    for group in groups.values():
        if len(group) > 1:
            (duplicates if _all_agree(group) else contradictions).append(_repeat(group))

    def find(code: str, level: Level, items: list[Item], answered: str) -> list[Finding]:
        says = f"{count(len(items), 'question')} asked again about the same image with {answered}"
        return findings_from(code, level, items, says, _repeat_example)

    merge = "another answer; merge them into one record with several `references`, or drop them"
    return [
        *find("contradictions", "error", contradictions, merge),
        *find("duplicates", "warning", duplicates, "the same answer"),
    ]


def _all_agree(group: Sequence[QuestionAnswer]) -> bool:
    """Whether every two of them have a correct answer in common."""
    accepted = {frozenset(map(normal_labels, question.accepted)) for question in group}
    return not any(first.isdisjoint(second) for first, second in combinations(accepted, 2))


def _repeat(group: Sequence[QuestionAnswer]) -> Item:
    answers = [{"answer": question.answer, "place": question.origin} for question in group]
    return {"question": group[0].question, "image": group[0].image_names, "answers": answers}


def _repeat_example(item: Item) -> str:
    answers = ", ".join(f"{quoted(answer['answer'], 40)} ({answer['place']})" for answer in item["answers"][:4])
    return f"{shown(item['question'], 60)} about {shown(item['image'], 40)}: {answers}"


def find_constants(answers: Answers) -> list[Finding]:
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
