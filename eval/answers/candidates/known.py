"""The candidates of each question: the answers of the training records to the same text, or those of a file.

Design: a candidate is compared as it is, so one with special tokens is an error. One whose conversation is longer than
a pack is left out, and counted. A question without candidates keeps its greedy answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lookonce.datasets.readers.candidates import Candidates, read_candidates
from lookonce.errors import RecordsError
from lookonce.eval.answers.candidates.conversations import CandidateConversations
from lookonce.eval.answers.questions import Questions
from lookonce.eval.scores.counts import training_answers
from lookonce.text import Notify, count, nfc, quoted

OfQuestion = dict[int, tuple[str, ...]]
"""The candidates of each question that has some, by its number."""


def candidates_of(questions: Questions, notify: Notify) -> OfQuestion:
    """The candidates of each question that has some; `notify` gets how many there are, and what was left out.

    Raises:
        UsageError: the file of candidates is missing or wrong.
        RecordsError: a candidate contains special tokens.
    """
    texts = [nfc(record.turns[turn].question) for record, turn in questions.asked]
    known = _known(questions)
    known_here = {text: known[text] for text in dict.fromkeys(texts) if text in known}
    _check(known_here, questions.session.chat_tokenizer.special_tokens)
    wanted = {number: known_here[text] for number, text in enumerate(texts) if text in known_here}
    found = _that_fit(questions, wanted, notify)
    notify(_numbers(found, len(texts)))
    if (file := _file(questions)) and (unasked := known.keys() - {*texts}):
        are = "that is" if len(unasked) == 1 else "that are"
        notify(f"{file} has {count(len(unasked), 'question')} {are} not asked, such as {quoted(min(unasked))}")
    return found


def _file(questions: Questions) -> Path | None:
    """The file of candidates, if they are in one."""
    wanted = questions.session.inputs.run.eval.candidates
    return wanted if isinstance(wanted, Path) else None


def _known(questions: Questions) -> Candidates:
    if file := _file(questions):
        return read_candidates(file)
    answers = training_answers(questions.session.inputs.records["train"])
    return {question: tuple(sorted(texts)) for question, texts in answers.items()}


def _check(known: Mapping[str, Sequence[str]], special_tokens: Sequence[str]) -> None:
    """Refuse special tokens, which could end a candidate early or stand for an image."""
    for question, candidates in known.items():
        for text in candidates:
            if token := next((token for token in special_tokens if token in text), None):
                raise RecordsError(
                    f"the candidate {quoted(text)} of {quoted(question)} contains {token}, a special token of the model"
                )


def _that_fit(questions: Questions, wanted: OfQuestion, notify: Notify) -> OfQuestion:
    """The candidates without those whose conversations are longer than a pack."""
    run, conversations = questions.session.inputs.run, CandidateConversations(questions)
    limit, longest_answer = run.batch.tokens_per_pack, run.eval.max_new_tokens

    def fits(number: int, text: str) -> bool:
        own = questions.dialogues.num_own(number) * longest_answer
        most = questions.examples[number].num_tokens + len(text.encode()) + 1  # no token is shorter than a byte
        return most + own <= limit or conversations.examples([(number, text)])[0].num_tokens + own <= limit

    found = {number: tuple(text for text in texts if fits(number, text)) for number, texts in wanted.items()}
    too_long = [(number, text) for number in wanted for text in wanted[number] if text not in found[number]]
    if too_long:
        number, text = too_long[0]
        notify(
            f"{count(len(too_long), 'candidate')} left out, longer with the question than `batch.tokens_per_pack` "
            f"{limit}; the first is {quoted(text)} of {questions.examples[number].origin}"
        )
    return {number: texts for number, texts in found.items() if texts}


def _numbers(found: OfQuestion, num_asked: int) -> str:
    """How many questions have candidates, and how many these are."""
    numbers = [len(texts) for texts in found.values()]
    without = f"{num_asked - len(found):,} without keep their greedy answers"
    if not numbers:
        return f"candidates: no question has any; {without}"
    each = f"{min(numbers)} to {max(numbers)} each, {numbers.count(1):,} with a single one"
    return f"candidates: {count(len(found), 'question')} with {each}; {without}"
