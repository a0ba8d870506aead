"""What an audit finds, and the problems of questions and answers: each is found by its own function.

Design: a finding is one problem: how severe it is, how often it occurs, and where. An `error` spoils a training or its
scores, or stops it; a `warning` is dirt that a model would learn; a `note` is worth knowing. `items` are complete and
for programs, `examples` are the first few and for people. Text, JSON and page show all kinds the same way.

Texts: records with a special token of a supported model, or with image marks that cannot be read, are malformed. Here
are what looks like a special token of another model, and what is an image only in another format.

Labels are separated by `;`, since sentences contain commas. Answers are compared only with answers to the same
question: a few hundred strings for labels, and one dictionary look-up per answer for free text.

Repeats: two answers agree if they have a correct answer in common; the order, the separators and the case of labels do
not count. If all answers to the same question about the same image agree, the question is a duplicate. If not, it is a
contradiction: a model cannot learn both answers, and no score of such a question is right.

Misspellings: two words of at least five letters differ by one letter, left out, added or replaced before the last two
letters, which inflection changes, and one of them is 20 times as frequent as the other. Or they differ by two swapped
neighbours, which real words hardly do: then the word with more relatives is right, where words that differ only by a
final "s" are relatives. "instrumnets" is in more rows of Kvasir-VQA than "instruments", but "instrument" occurs too.
There is no dictionary, since none knows "oesophagitis", and no list of known typos; only the words of the files. Each
word is filed under every string that leaves out one of its letters, and words under the same string are compared. So
the work grows with the number of words and not with its square (https://github.com/wolfgarbe/SymSpell). Only the
`MAX_WORDS` most frequent words are compared. The result is only a hint: "affect" and "effect" are both words.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from lookonce.datasets.audit.corpus import Corpus, QuestionAnswer
from lookonce.datasets.formats.image_references import MARKUP
from lookonce.datasets.formats.record import texts_within
from lookonce.text import count, listed, nfc, one_line, quoted, shown

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
"""All levels, the most severe first."""
NUM_EXAMPLES = 3
"""A finding shows this many of its items."""

Item = dict[str, Any]
"""One occurrence of a problem, in plain types for JSON."""


@dataclass(frozen=True)
class Finding:
    """Something wrong, or worth knowing."""

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
        """How many items are not among the examples."""
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
    """Return one finding with its first few items as examples, or none if there are no items."""
    if not items:
        return []
    examples = tuple(one_line(example(item)) for item in items[:num_examples])
    return [Finding(code, level, len(items) if count is None else count, says, examples, tuple(items))]


def encodable(value: Any) -> Any:
    """Return a plain value with all lone surrogates in its texts escaped, which UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, list | tuple) else value


MISSING = {"nan", "null", "n/a", "#n/a", "<na>", "nat", "undefined"}
"""Missing values written as text. "none" and "na" are not among them, since they may be answers."""
NO_QUESTION = MISSING | {"none", "na"}
SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
IMAGE_TAG = re.compile(rf"<(?:image|video|audio)>|{MARKUP}", re.IGNORECASE)
"""Tags that other trainers replace with an image, and images in HTML and Markdown; here they would be text."""


def find_texts(corpus: Corpus, questions: Sequence[QuestionAnswer]) -> list[Finding]:
    """Find texts that are wrong by themselves."""

    def where(text_of: Callable[[QuestionAnswer], str]) -> Iterator[tuple[str, str]]:
        return ((text_of(one), one.origin) for one in questions)

    spaces = where(lambda one: one.answer if one.answer != one.answer.strip() else "")
    short = where(lambda one: one.question if len(one.question.split()) < 2 and not _missing(one) else "")
    empty = where(lambda one: "" if any(char.isalnum() for char in one.answer) else one.answer)
    tokens, tags = _with(SPECIAL_TOKEN, corpus), _with(IMAGE_TAG, corpus)
    return [
        *_find("answer-spaces", "with spaces or line breaks around the answer, which models learn", spaces),
        *_find("missing-values", "with a missing value written as text", where(_missing)),
        *_find("short-questions", "of fewer than two words", short),
        *_find("empty-answers", "with an answer without a letter or a digit", empty),
        *_find("special-tokens", "with what looks like a special token of another model", tokens),
        *_find("image-marks", "with an image tag in its text, which would be read as text", tags),
        *find_other_forms(corpus),
    ]


def find_other_forms(corpus: Corpus) -> list[Finding]:
    """Find texts that are not in NFC, the form in which texts are compared and models write."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for kind, text, origin in _texts(corpus):
        if text != nfc(text):
            places[kind, text].append(origin)
    kinds = Counter(kind for (kind, _), some in places.items() for _ in some)
    records = {origin for some in places.values() for origin in some}
    most_first = sorted(places.items(), key=lambda pair: -len(pair[1]))
    items: list[Item] = [
        {"text": text, "kind": kind, "count": len(some), "places": some} for (kind, text), some in most_first
    ]
    says = (
        f"{count(len(records), 'record')} with texts that are not in NFC, Unicode's usual form, such as accents apart "
        f"from their letters ({listed([count(number, kind) for kind, number in kinds.items()])}); they are compared in "
        "NFC, in which models write"
    )
    return findings_from("not-nfc", "note", items, says, _place_example, count=len(records))


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


def _find(code: str, says: str, found: Iterable[tuple[str, str]]) -> list[Finding]:
    """Make an item of each distinct text, the most frequent first, with all places where it occurs."""
    places: dict[str, list[str]] = defaultdict(list)
    for text, origin in found:
        if text:
            places[text].append(origin)
    most_first = sorted(places.items(), key=lambda pair: -len(pair[1]))
    items: list[Item] = [{"text": text, "count": len(some), "places": some} for text, some in most_first]
    number = sum(map(len, places.values()))
    return findings_from(code, "warning", items, f"{count(number, 'question')} {says}", _place_example, count=number)


def _place_example(item: Item) -> str:
    more = f" and {item['count'] - 1:,} more" if item["count"] > 1 else ""
    return f"{quoted(item['text'])} ({item['places'][0]}{more})"


def _missing(one: QuestionAnswer) -> str:
    question, answer = one.question.strip().casefold(), one.answer.strip().casefold()
    return f"{one.question} {one.answer}" if question in NO_QUESTION or answer in MISSING else ""


SEPARATOR = re.compile(r"(?:(?<!\s)\s+)?;\s*")
"""With the spaces around it; a search for `\\s*;` would take the square of the number of spaces."""
UNIT = re.compile(r"(.*\d)\s*[^\W\d_]+", re.DOTALL)
"""A label that ends in a number and letters, such as ">20mm"."""

Answers = Mapping[str, Mapping[str, int]]
"""For each question, how often each answer is given."""


def plain(text: str) -> str:
    """Remove what does not change a text's meaning: case, doubled spaces, spaces around `;`, a final full stop."""
    return SEPARATOR.sub(";", " ".join(text.casefold().split())).rstrip(".;").strip()


def same_labels(answer: str) -> tuple[str, ...]:
    """Return the labels of an answer; equal for answers that differ only in the order of their labels."""
    return tuple(sorted(set(plain(answer).split(";"))))


def find_label_variants(answers: Answers) -> list[Finding]:
    """Find answers that a person would call the same and an exact match would not."""
    reordered = _variants(answers, same_labels, lambda answer: plain(answer).replace(";", "; "))
    num_rarer = sum(sum(item["answers"].values()) - max(item["answers"].values()) for item in reordered)
    rewritten = _variants(answers, plain, str)
    return [
        *findings_from(
            "label-order",
            "warning",
            reordered,
            f"{count(len(reordered), 'set')} of labels in more than one order; exact match would call "
            f"{count(num_rarer, 'answer')} wrong only because of the order",
            _variant_example,
        ),
        *findings_from(
            "answer-writing",
            "warning",
            rewritten,
            f"{count(len(rewritten), 'answer')} written in more than one way (case, spaces, a full stop)",
            _variant_example,
        ),
        *_separators(answers),
        *_units(answers),
    ]


def _variants(answers: Answers, meaning: Callable[[str], Hashable], writing: Callable[[str], str]) -> list[Item]:
    """Find answers of one question that mean the same and are written differently."""
    items: list[Item] = []
    for question, counts in answers.items():
        written: dict[Hashable, Counter[str]] = defaultdict(Counter)
        for answer, number in counts.items():
            written[meaning(answer)][writing(answer)] += number
        for same in written.values():
            if len(same) > 1:
                items.append({"question": question, "answers": dict(same.most_common())})
    return sorted(items, key=lambda item: -sum(item["answers"].values()))


def _separators(answers: Answers) -> list[Finding]:
    """Find the separators of labels, if there are several."""
    styles: dict[str, Counter[str]] = defaultdict(Counter)
    for counts in answers.values():
        for answer, number in counts.items():
            for style in set(SEPARATOR.findall(answer)):
                styles[style][answer] += number
    items: list[Item] = [
        {"separator": style, "answers": counts.total(), "example": counts.most_common(1)[0][0]}
        for style, counts in styles.items()
    ]
    items.sort(key=lambda item: -item["answers"])
    return findings_from(
        "separators",
        "warning",
        items if len(items) > 1 else [],
        f"labels are separated in {len(items)} ways",
        lambda item: (
            f"{quoted(item['separator'])} in {count(item['answers'], 'answer')}, as in {quoted(item['example'])}"
        ),
    )


def _units(answers: Answers) -> list[Finding]:
    """Find labels that end in a number and also occur with a unit."""
    items = []
    for question, counts in answers.items():
        labels: Counter[str] = Counter()
        for answer, number in counts.items():
            labels.update(dict.fromkeys(set(SEPARATOR.split(answer.strip())), number))
        for label, number in labels.items():
            match = UNIT.fullmatch(label)
            if match and match[1] in labels:
                items.append({"question": question, "answers": {label: number, match[1]: labels[match[1]]}})
    return findings_from(
        "units", "warning", items, f"{count(len(items), 'label')} with and without its unit", _variant_example
    )


def _variant_example(item: Item) -> str:
    answers = ", ".join(f"{quoted(answer, 50)} {number:,}" for answer, number in list(item["answers"].items())[:4])
    return f"{shown(item['question'], 60)} {answers}"


def find_repeats(questions: Iterable[QuestionAnswer]) -> list[Finding]:
    """Find duplicates and contradictions."""
    groups: dict[object, list[QuestionAnswer]] = defaultdict(list)
    for one in questions:
        groups[one.file, one.images, one.before, one.question].append(one)
    repeated = [(group, all_agree(group)) for group in groups.values() if len(group) > 1]
    contradictions = [_item(group) for group, agree in repeated if not agree]
    duplicates = [_item(group) for group, agree in repeated if agree]
    return [
        *findings_from(
            "contradictions",
            "error",
            contradictions,
            f"{count(len(contradictions), 'question')} asked again about the same image with another answer; merge "
            "them into one record with several `references`, or drop them",
            _repeat_example,
        ),
        *findings_from(
            "duplicates",
            "warning",
            duplicates,
            f"{count(len(duplicates), 'question')} asked again about the same image with the same answer",
            _repeat_example,
        ),
    ]


def all_agree(group: Sequence[QuestionAnswer]) -> bool:
    """Whether every two of them have a correct answer in common."""
    accepted = {frozenset(same_labels(answer) for answer in one.accepted) for one in group}
    return not any(one.isdisjoint(other) for one, other in combinations(accepted, 2))


def _item(group: Sequence[QuestionAnswer]) -> Item:
    answers = [{"answer": one.answer, "place": one.origin} for one in group]
    return {"question": group[0].question, "image": group[0].image_names, "answers": answers}


def _repeat_example(item: Item) -> str:
    answers = ", ".join(f"{quoted(each['answer'], 40)} ({each['place']})" for each in item["answers"][:4])
    return f"{shown(item['question'], 60)} about {shown(item['image'], 40)}: {answers}"


WORD = re.compile(r"[^\W\d_]+")
MIN_LETTERS, MAX_LETTERS = 5, 40
INFLECTION = 2
"""The number of letters at the end of a word that inflection changes."""
MIN_RATIO = 20
"""A word must be this many times as frequent as its misspelling."""
MAX_WORDS = 50_000
NUM_TEXTS = 3
"""An item names this many texts in which the word occurs."""


def find_misspellings(questions: Mapping[str, int], answers: Mapping[str, int]) -> list[Finding]:
    """Find likely misspellings in questions and answers, given as texts and how often each occurs."""
    texts = Counter(questions)
    texts.update(answers)
    words = count_words(texts)
    items: list[Item] = [
        {"word": wrong, "count": words[wrong], "like": right, "like_count": words[right], "texts": []}
        for wrong, right in look_alikes(dict(words.most_common(MAX_WORDS)))
    ]
    items.sort(key=lambda item: -item["count"])
    _add_texts(items, texts)
    bound = f" (of {len(words):,} words the {MAX_WORDS:,} most frequent)" if len(words) > MAX_WORDS else ""
    says = f"{count(len(items), 'word')} that may be misspelt{bound}"
    return findings_from("spelling", "warning", items, says, _misspelling_example)


def count_words(texts: Mapping[str, int]) -> Counter[str]:
    """Count the texts with each word; words are in lower case."""
    words: Counter[str] = Counter()
    for text, number in texts.items():
        for word in _words_of(text):
            words[word] += number
    return words


def look_alikes(words: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a word that looks misspelt and the word that it looks like."""
    relatives: Counter[str] = Counter()
    for word, number in words.items():
        relatives[word.removesuffix("s")] += number
    for one, other in _near(words):
        wrong, right = sorted((one, other), key=lambda word: relatives[word.removesuffix("s")])
        ratio = relatives[right.removesuffix("s")] / relatives[wrong.removesuffix("s")]
        if is_swap(wrong, right) and ratio > 1 or is_slip(wrong, right) and words[right] >= MIN_RATIO * words[wrong]:
            yield wrong, right


def is_swap(one: str, other: str) -> bool:
    """Whether the words differ by two swapped neighbours."""
    start = _num_common(one, other)
    swapped = one[:start] + one[start + 1 : start + 2] + one[start : start + 1] + one[start + 2 :]
    return one != other and swapped == other


def is_slip(one: str, other: str) -> bool:
    """Whether the words differ by one letter, and not in their last letters."""
    if len(one) < len(other):
        one, other = other, one
    start = _num_common(one, other)
    rest = other[start:] if len(one) > len(other) else other[start + 1 :]
    return one != other and one[start + 1 :] == rest and start < len(one) - INFLECTION


def _near(words: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield all pairs that differ by one letter or a swap, and a few others."""
    filed: dict[str, list[str]] = defaultdict(list)
    for word in words:
        for left in {word, *(word[:index] + word[index + 1 :] for index in range(len(word)))}:
            filed[left].append(word)
    pairs = {(min(pair), max(pair)) for met in filed.values() if len(met) > 1 for pair in combinations(met, 2)}
    yield from sorted(pairs)


def _num_common(one: str, other: str) -> int:
    """Count the letters that both words begin with."""
    return len(os.path.commonprefix([one, other]))


def _words_of(text: str) -> set[str]:
    return {word for word in WORD.findall(text.casefold()) if MIN_LETTERS <= len(word) <= MAX_LETTERS}


def _add_texts(items: list[Item], texts: Counter[str]) -> None:
    """Add to each item the most frequent texts with its word."""
    found = {item["word"]: item["texts"] for item in items}
    for text, _ in texts.most_common() if items else ():
        for word in found.keys() & _words_of(text):
            if len(found[word]) < NUM_TEXTS:
                found[word].append(text)


def _misspelling_example(item: Item) -> str:
    return (
        f"{quoted(item['word'])} ({item['count']:,}) looks like a misspelling of {quoted(item['like'])} "
        f"({item['like_count']:,}): {quoted(item['texts'][0])}"
    )
