"""The candidates of questions: those of training or of a file; what cannot be scored is refused or left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lookonce.datasets.records import Record, Turn
from lookonce.errors import RecordsError
from lookonce.eval.answers.candidates import known
from lookonce.eval.answers.candidates.choice import Choice
from lookonce.eval.answers.candidates.known import candidates_of
from lookonce.eval.answers.dialogues import Dialogues
from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.train.data.tokenize import Example

TRAINING = [Record((Path("a.jpg"),), (Turn("q", answer), Turn("r", "1"))) for answer in ("yes", "no", "yes")]


class Conversations:
    """Prompts of 20 tokens and candidates of a token a word."""

    def __init__(self, questions) -> None:
        pass

    def examples(self, wanted):
        return [SimpleNamespace(num_tokens=20 + len(text.split())) for _, text in wanted]


@pytest.fixture
def ask(make_run, monkeypatch):
    """Questions with these texts about an image each."""
    monkeypatch.setattr(known, "CandidateConversations", Conversations)

    def ask(*texts: str, candidates: str | None = "training", tokens_per_pack: int = 8192) -> SimpleNamespace:
        run = make_run(eval={"candidates": candidates}, batch={"tokens_per_pack": tokens_per_pack})
        asked = [(Record((Path(f"{n}.jpg"),), (Turn(text, "x"),)), 0) for n, text in enumerate(texts)]
        prompt = np.arange(20, dtype=np.int32)
        examples = [Example(prompt, prompt < 0, (str(n),), (1,), f"val:{n}") for n in range(len(texts))]
        chat = SimpleNamespace(special_tokens=["<|end|>"], image_token_id=3)
        session = SimpleNamespace(inputs=SimpleNamespace(run=run, records={"train": TRAINING}), chat_tokenizer=chat)
        dialogues = Dialogues(asked, [[number] for number in range(len(asked))], examples, [*map(Dialogue, examples)])
        return SimpleNamespace(session=session, asked=asked, examples=examples, dialogues=dialogues, name="val")

    return ask


def test_candidates_of_training_are_its_distinct_answers_to_the_text(ask):
    notes = []
    assert candidates_of(ask("q", "s", "r", "q"), notes.append) == {0: ("no", "yes"), 2: ("1",), 3: ("no", "yes")}
    assert notes == [
        "candidates: 3 questions with 1 to 2 each, 1 with a single one; 1 without keep their greedy answers"
    ]
    assert candidates_of(ask("s"), notes.append) == {}
    assert notes[-1] == "candidates: no question has any; 1 without keep their greedy answers"


def test_candidates_of_a_file_and_its_questions_that_are_not_asked(ask, tmp_path):
    (tmp_path / "known.json").write_text(json.dumps({"q": ["b", "a"], "Q": ["a"]}))
    notes = []
    assert candidates_of(ask("q", candidates=str(tmp_path / "known.json")), notes.append) == {0: ("b", "a")}
    assert notes[-1].endswith('known.json has 1 question that is not asked, such as "Q"')


def test_special_tokens_are_refused(ask, tmp_path):
    (tmp_path / "known.json").write_text(json.dumps({"q": ["a<|end|>"]}))
    with pytest.raises(RecordsError, match=r'the candidate "a<\|end\|>" of "q" contains <\|end\|>, a special token'):
        candidates_of(ask("q", candidates=str(tmp_path / "known.json")), print)


def test_a_candidate_that_is_longer_than_a_pack_is_left_out_and_named(ask, tmp_path):
    (tmp_path / "known.json").write_text(json.dumps({"q": ["a", "a " * 9, "a " * 50]}))
    notes = []
    found = candidates_of(ask("q", candidates=str(tmp_path / "known.json"), tokens_per_pack=30), notes.append)
    assert found == {0: ("a", "a a a a a a a a a")}
    assert notes[0].startswith("1 candidate left out, longer with the question than `batch.tokens_per_pack` 30; ")
    assert notes[0].endswith(" of val:0")


def test_the_choice_has_an_identity_and_whole_questions_in_batches(ask, monkeypatch):
    monkeypatch.setattr("lookonce.eval.answers.candidates.choice.CANDIDATES_OF_BATCH", 3)
    assert Choice.of(ask("q", candidates=None)) is None
    choice = Choice.of(ask("q", "s", "r", "q"))
    assert choice.batches == [[0, 2], [3]] and choice.name == "val-candidates"
    assert choice.identity("a") == Choice.of(ask("q", "s", "r", "q")).identity("a") != choice.identity("b")
    assert choice.identity("a") != Choice.of(ask("q", "s", "s", "q")).identity("a")
