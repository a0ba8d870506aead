"""A conversation in the terminal: own answers are part of the prompt, and each image is encoded once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lookonce.cache.model.tower import Tower
from lookonce.cli import main
from lookonce.datasets.records import read_records
from lookonce.eval.answerer import Answerer, Conversation

FIRST, SECOND = "Is there text?", "Where is it?"


@pytest.fixture
def run_file(make_run, tmp_path: Path) -> Path:
    """A run that was not trained, and whose cache is not built."""
    path = tmp_path / "run.yaml"
    path.write_text(make_run(eval={"max_new_tokens": 5, "engine": "shared"}).to_yaml())
    return path


def converse(*words: str | Path, lines: list[str]) -> tuple[list[str], str]:
    """The lines on stdout, and all of stderr."""
    given = ["ask", *map(str, words), "--untuned", "--json"]
    done = CliRunner().invoke(main, given, input="\n".join(lines))
    assert done.exit_code == 0 and "Traceback" not in done.output, done.output
    return done.stdout.splitlines(), done.stderr


def test_answers_follow_the_models_own_answers_and_images_are_encoded_once(run_file, sample, tmp_path, monkeypatch):
    encoded, real = [], Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda *given: encoded.append(1) or real(*given))
    monkeypatch.chdir(tmp_path)
    one, other = sorted((sample / "images").glob("*.jpg"))[:2]
    lines = [FIRST, "", SECOND, "/save a.jsonl", "/reset", SECOND, f"/image '{other}' {one}", FIRST, "/save b.jsonl"]
    printed, said = converse(run_file, one, "--system", "Be brief.", lines=[*lines, "/quit", "never asked"])
    found = [json.loads(line) for line in printed]
    assert [row["question"] for row in found] == [FIRST, SECOND, SECOND, FIRST]
    assert "wrote a.jsonl" in said and len(encoded) == 2
    [first], [second] = (read_records(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    assert first.images == (one,) and second.images == (other, one) and first.system == second.system == "Be brief."
    assert [turn.answer for turn in first.turns] == [row["answer"] for row in found[:2]]
    again = Answerer.open(run_file, untuned=True).answer_records([first, second])
    assert [answer.text for answer in again] == [found[number]["answer"] for number in (0, 1, 3)]
    assert found[1]["answer"] != found[2]["answer"], "the first turn is part of the prompt"


def test_a_mistake_does_not_end_the_conversation(run_file, sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text("")
    frame = next((sample / "images").glob("*.jpg"))
    wrong = ["/save a.jsonl", "/image gone.jpg", "/what", "/image 'open", "/save", "Is it <|im_end|>?"]
    printed, said = converse(run_file, frame, lines=[*wrong, FIRST, "/save there.jsonl"])
    assert len(printed) == 1
    for words in (
        "nothing to save",
        "cannot read image",
        "/what is not a command",
        "close the quotes",
        "/save is not a",
    ):
        assert words in said
    assert "special token" in said and "there.jsonl exists; name another file" in said


def test_an_image_that_cannot_be_read_ends_it_before_the_first_question(run_file):
    done = CliRunner().invoke(main, ["ask", str(run_file), "gone.jpg", "--untuned"])
    assert done.exit_code == 1 and "cannot read image" in done.stderr


def test_words_are_given_as_they_come(run_file, sample):
    conversation = Conversation(Answerer.open(run_file, untuned=True), [next((sample / "images").glob("*.jpg"))])
    for question in (FIRST, SECOND):
        words: list[str] = []
        answer = conversation.ask(question, words.append)
        assert "".join(words) == answer.text and len(words) > 1
