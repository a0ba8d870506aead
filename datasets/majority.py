"""The majority baseline: always give the most frequent training answer of a question, without looking at any image.

In a conversation the earlier turns often say what the answer is: after "Is there a polyp?" "no", there are none to
count. The majority given the context has this knowledge too, and still does not look at any image.

Design: long conversations have hardly ever been had before, turn by turn. So after turns that are new together, one of
them decides. On Kvasir-VQA, with all questions about an image in one conversation in any order, that is right for 77 %
of the questions, where the majority has 65 % and whole conversations alone 65 %. To weigh all turns together would know
more, and would be a model. The cost: a turn counts once for each question after it, so time grows with the square of
the turns.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import xxhash

from lookonce.datasets.formats.record import Record, Turn
from lookonce.text import nfc

MIN_WHOLE = 2
"""How often training must have a question after the same turns for these to decide."""
MIN_ONE = 5
"""How often it must have the question after one of them for this one to decide."""
MOST_EARLIER = 64
"""How many earlier turns may be this one; Kvasir-VQA-x1 has 25 questions about an image."""
TurnSet = tuple[int, int]
"""How many different turns a set has, and the sum of their hashes; a conversation adds one turn to it at a time."""


class Majority:
    """The most frequent answer of each question, in NFC; for other questions, the most frequent answer of all."""

    def __init__(self, asked: Iterable[tuple[str, str]], min_asked: int = 1) -> None:
        """Learn from questions with their answers; a question asked less than `min_asked` times counts as unknown."""
        by_question: dict[str, Counter[str]] = defaultdict(Counter)
        of_all: Counter[str] = Counter()
        for question, answer in asked:
            by_question[nfc(question)][nfc(answer)] += 1
            of_all[nfc(answer)] += 1
        self._best = {text: _most(answers) for text, answers in by_question.items() if answers.total() >= min_asked}
        self._fallback = _most(of_all)

    @classmethod
    def of_records(cls, records: Iterable[Record]) -> Majority:
        """Learn from all turns of some records."""
        return cls((turn.question, turn.answer) for record in records for turn in record.turns)

    def answer(self, question: str) -> str:
        return self._best.get(nfc(question), self._fallback)


class MajorityInContext:
    """The most frequent answer of each question after the same earlier turns, in any order.

    Answers of a context come before the turns. After turns that training has too seldom, it is the most frequent answer
    after the most telling of them: the one whose question, with its answer, says most about the answer in training.
    Without such a turn it is the most frequent answer of the question, whatever came before it.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        records = list(records)
        given = Counter(turn for record in records for turn in {one.in_nfc for one in (*record.known, *record.turns)})
        self._frequent = {turn for turn, number in given.items() if number >= MIN_ONE}
        self._of_question = Majority.of_records(records)
        after_all, after_one = _answers_after(records, self._frequent)
        self._after_all = {key: _most(found) for key, found in after_all.items()}
        self._after_one = {key: _most(found) for key, found in after_one.items()}
        self._tells = _shares_told(after_one)

    def answer(self, earlier: tuple[Turn, ...], question: str) -> str:
        """The answer after these turns; of equally telling ones the first decides."""
        question, before = nfc(question), _Before(self._frequent)
        for turn in earlier:
            before.add(turn.in_nfc)
        if (whole := (before.all, question)) in self._after_all:
            return self._after_all[whole]
        if known := [turn for turn in before.recent if (turn, question) in self._after_one]:
            return self._after_one[max(known, key=lambda turn: self._tells[turn.question, question]), question]
        return self._of_question.answer(question)


class _Before:
    """The different turns before a question: which set they are, and the last few of those that are `frequent`."""

    def __init__(self, frequent: AbstractSet[Turn]) -> None:
        self._frequent = frequent
        self._seen: set[Turn] = set()
        self.all: TurnSet = (0, 0)
        self.recent: deque[Turn] = deque(maxlen=MOST_EARLIER)

    def add(self, turn: Turn) -> None:
        if turn in self._seen:
            return
        self._seen.add(turn)
        digest = xxhash.xxh3_128_intdigest(
            f"{len(turn.question)} {turn.question}{turn.answer}".encode("utf-8", "surrogatepass")
        )
        self.all = (self.all[0] + 1, (self.all[1] + digest) % (1 << 128))
        if turn in self._frequent:
            self.recent.append(turn)


def _asked_after(records: Iterable[Record], frequent: AbstractSet[Turn]) -> Iterator[tuple[_Before, Turn]]:
    """Each turn that has some before it, with these, all in NFC."""
    for record in records:
        before = _Before(frequent)
        for turn in record.known:
            before.add(turn.in_nfc)
        for turn in (turn.in_nfc for turn in record.turns):
            if before.all[0]:
                yield before, turn
            before.add(turn)


def _answers_after(
    records: Sequence[Record], frequent: AbstractSet[Turn]
) -> tuple[dict[tuple[TurnSet, str], Counter[str]], dict[tuple[Turn, str], Counter[str]]]:
    """The answers to each question after the same turns, and after one of the `frequent`; where there are enough."""
    asked = Counter(nfc(turn.question) for record in records for turn in record.turns)
    after_all: dict[tuple[TurnSet, str], Counter[str]] = defaultdict(Counter)
    after_one: dict[tuple[Turn, str], Counter[str]] = defaultdict(Counter)
    for before, turn in _asked_after(records, frequent):
        after_all[before.all, turn.question][turn.answer] += 1
        for earlier in before.recent if asked[turn.question] >= MIN_ONE else ():
            after_one[earlier, turn.question][turn.answer] += 1
    return (
        {key: answers for key, answers in after_all.items() if answers.total() >= MIN_WHOLE},
        {key: answers for key, answers in after_one.items() if answers.total() >= MIN_ONE},
    )


def _shares_told(after_one: Mapping[tuple[Turn, str], Counter[str]]) -> dict[tuple[str, str], float]:
    """How often the answer to one question tells that to another: the share of the most frequent answers after it."""
    told: Counter[tuple[str, str]] = Counter()
    asked: Counter[tuple[str, str]] = Counter()
    for (turn, question), answers in after_one.items():
        told[turn.question, question] += max(answers.values())
        asked[turn.question, question] += answers.total()
    return {pair: told[pair] / asked[pair] for pair in asked}


def _most(answers: Counter[str]) -> str:
    """Return the most frequent answer, the first of equals; empty if there is none."""
    return answers.most_common(1)[0][0] if answers else ""
