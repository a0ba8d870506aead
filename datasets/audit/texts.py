"""Near-empty texts, missing values written as text, spaces around answers, Unicode, and texts that training refuses.

Records with a special token of a supported model, or with image marks that cannot be read, are malformed. Here are what
looks like a special token of another model, and what is an image only in another format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from lookonce.datasets.audit.corpus import Corpus
from lookonce.datasets.audit.findings import Finding, Item, Level, findings_from
from lookonce.datasets.audit.questions import QuestionAnswer
from lookonce.datasets.formats.checks import texts_within
from lookonce.datasets.formats.image_tags import MARKUP
from lookonce.text import count, listed, nfc, quoted

MISSING = {"nan", "null", "n/a", "#n/a", "<na>", "nat", "undefined"}
"""Missing values written as text. "none" and "na" are not among them, since they may be answers."""
NO_QUESTION = MISSING | {"none", "na"}
SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
IMAGE_TAG = re.compile(rf"<(?:image|video|audio)>|{MARKUP}", re.IGNORECASE)
"""Tags that other trainers replace with an image, and images in HTML and Markdown; here they would be text."""


def find_texts(corpus: Corpus, questions: Sequence[QuestionAnswer]) -> list[Finding]:
    """Find texts that are wrong by themselves."""
    kinds: tuple[tuple[str, Level, str, Callable[[QuestionAnswer], str]], ...] = (
        (
            "answer-spaces",
            "warning",
            "with spaces or line breaks around the answer, which models learn",
            _spaces,
        ),
        ("missing-values", "warning", "with a missing value written as text", _missing),
        ("short-questions", "warning", "of fewer than two words", _short_question),
        ("empty-answers", "warning", "with an answer without a letter or a digit", _no_answer),
    )
    marks: tuple[tuple[str, Level, str, re.Pattern[str]], ...] = (
        ("special-tokens", "warning", "with what looks like a special token of another model", SPECIAL_TOKEN),
        ("image-marks", "warning", "with an image tag in its text, which would be read as text", IMAGE_TAG),
    )
    return [
        *(
            finding
            for code, level, says, text_of in kinds
            for finding in _find(code, level, says, ((text_of(one), one.origin) for one in questions))
        ),
        *(finding for code, level, says, mark in marks for finding in _find(code, level, says, _with(mark, corpus))),
        *find_other_forms(corpus),
    ]


def find_other_forms(corpus: Corpus) -> list[Finding]:
    """Find texts that are not in NFC, the form in which texts are compared and models write."""
    items: dict[tuple[str, str], Item] = {}
    kinds: Counter[str] = Counter()
    records: set[str] = set()
    for kind, text, origin in _texts(corpus):
        if text != nfc(text):
            kinds[kind] += 1
            records.add(origin)
            item = items.setdefault((kind, text), {"text": text, "kind": kind, "count": 0, "places": []})
            item["count"] += 1
            item["places"].append(origin)
    ordered = sorted(items.values(), key=lambda item: -item["count"])
    says = (
        f"{count(len(records), 'record')} with texts that are not in NFC, Unicode's usual form, such as accents apart "
        f"from their letters ({listed([count(number, kind) for kind, number in kinds.items()])}); they are compared in "
        "NFC, in which models write"
    )
    return findings_from("not-nfc", "note", ordered, says, _example, count=len(records))


def _texts(corpus: Corpus) -> Iterator[tuple[str, str, str]]:
    """All texts of all records: the kind of text, the text and the place of its record."""
    for file in corpus.files:
        for record in file.records:
            origin = file.origin(record)
            if record.system is not None:
                yield "system text", record.system, origin
            for turn in record.turns:
                yield "question", turn.question, origin
                yield "answer", turn.answer, origin
            yield from (("metadata text", text, origin) for text in texts_within(record.metadata))


def _with(mark: re.Pattern[str], corpus: Corpus) -> Iterator[tuple[str, str]]:
    """The texts with a mark and their places; a question that has it twice counts once."""
    for file in corpus.files:
        for record in file.records:
            origin, system = file.origin(record), record.system or ""
            for turn in record.turns:
                if text := next((text for text in (turn.question, turn.answer, system) if mark.search(text)), ""):
                    yield text, origin
                system = ""


def _find(code: str, level: Level, says: str, found: Iterable[tuple[str, str]]) -> list[Finding]:
    """Make an item of each distinct text, the most frequent first, with all places where it occurs."""
    items: dict[str, Item] = {}
    for text, origin in found:
        if text:
            item = items.setdefault(text, {"text": text, "count": 0, "places": []})
            item["count"] += 1
            item["places"].append(origin)
    ordered = sorted(items.values(), key=lambda item: -item["count"])
    number = sum(item["count"] for item in ordered)
    return findings_from(code, level, ordered, f"{count(number, 'question')} {says}", _example, count=number)


def _example(item: Item) -> str:
    more = f" and {item['count'] - 1:,} more" if item["count"] > 1 else ""
    return f"{quoted(item['text'])} ({item['places'][0]}{more})"


def _spaces(one: QuestionAnswer) -> str:
    return one.answer if one.answer != one.answer.strip() else ""


def _missing(one: QuestionAnswer) -> str:
    question, answer = one.question.strip().casefold(), one.answer.strip().casefold()
    return f"{one.question} {one.answer}" if question in NO_QUESTION or answer in MISSING else ""


def _short_question(one: QuestionAnswer) -> str:
    return one.question if len(one.question.split()) < 2 and not _missing(one) else ""


def _no_answer(one: QuestionAnswer) -> str:
    return "" if any(char.isalnum() for char in one.answer) else one.answer
