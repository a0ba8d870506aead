"""Questions to be asked about any images, and the rounds in which they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.datasets.records import Turn
from lookonce.errors import RecordsError, UsageError
from lookonce.eval import answerer
from lookonce.eval.answerer import ask_each, match_images, plan_rounds, read_questions


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jpg", "a.jpg", "deep/c.jpg", "notes.txt", "odd[1].jpg"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "empty" / ".hidden.jpg").parent.mkdir()
    (tmp_path / "empty" / ".hidden.jpg").touch()
    (tmp_path / "empty" / "a.txt").touch()
    return tmp_path / "images"


def names(*patterns: str) -> list[str]:
    return [path.name for path in match_images(patterns)]


def test_patterns_match_files_sorted_and_each_once(folder):
    assert names("images/*.jpg") == ["a.jpg", "b.jpg", "odd[1].jpg"]
    assert names("images/b*", "images/*.jpg") == ["b.jpg", "a.jpg", "odd[1].jpg"]
    assert names("images/**/*.jpg") == ["a.jpg", "b.jpg", "c.jpg", "odd[1].jpg"]
    assert names("images/odd[1].jpg", str(folder / "a.jpg")) == ["odd[1].jpg", "a.jpg"]


def test_a_folder_stands_for_the_images_in_it_and_below_it(folder):
    (folder / "deep" / "UPPER.PNG").touch()
    (folder / "deep" / "again").symlink_to(folder)  # a circle
    (folder / "linked").symlink_to(folder / ".." / "others")
    (folder / ".." / "others").mkdir()
    (folder / ".." / "others" / "d.webp").touch()
    assert names("images") == ["a.jpg", "b.jpg", "UPPER.PNG", "c.jpg", "d.webp", "odd[1].jpg"]
    assert names("images/b.jpg", "images")[:3] == ["b.jpg", "a.jpg", "UPPER.PNG"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("images/*.png", r"--images images/\*\.png matches no file"),
        ("empty", r"--images empty is a folder without images: no name .* ends in \.jpg, \.jpeg, \.png, .*\.webp;"),
        ("images/d*", "matches no file"),
    ],
)
def test_a_pattern_without_a_file_is_refused(folder, pattern, message):
    with pytest.raises(UsageError, match=message):
        match_images(["images/a.jpg", pattern])


def test_each_question_is_asked_about_each_image(folder):
    asked = ask_each([(Path("images/../images/a.jpg"),), (), (Path("b"), Path("c"))], ["q", "r"], "Be brief.")
    records = [record for record, turn in asked if turn == 0]
    assert [record.turns for record in records] == [(Turn("q", ""),), (Turn("r", ""),)] * 3
    assert [len(record.images) for record in records] == [1, 1, 0, 0, 2, 2]
    assert records[0].images == (folder / "a.jpg",) and records[0].system == "Be brief."
    assert len({record.origin for record in records}) == 6 and records[1].origin == f"{folder}/a.jpg:2"
    with pytest.raises(UsageError, match="question 2 of 2 is empty"):
        ask_each([()], ["q", " \n"])
    for words in ((["q", "r \udcff"], None), (["q"], "s \udcff")):
        with pytest.raises(UsageError, match=r'" .udcff|[rs] .udcff" is not UTF-8; set the terminal'):
            ask_each([()], *words)


def test_malformed_records_are_reported_and_the_others_are_read(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"images": [], "turns": [{"question": ""}]}\nno\n{"images": [], "turns": [{"question": "q"}]}\n')
    asked, broken = read_questions(path)
    assert [(record.turns, turn) for record, turn in asked] == [((Turn("q", ""),), 0)]
    assert list(broken) == [f"{path}:1", f"{path}:2"] and "not empty" in str(broken[f"{path}:1"])
    path.write_text("no\n")
    with pytest.raises(RecordsError, match="q.jsonl:1"):
        read_questions(path)


SIZES = {"a": 10, "b": 40, "c": 60, "d": 0, "e": 300}


def planned(keys_of, limit):
    before, answerer.ROUND_TOKENS = answerer.ROUND_TOKENS, limit
    try:
        return plan_rounds(keys_of, SIZES.__getitem__)
    finally:
        answerer.ROUND_TOKENS = before


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=3).map(tuple)), st.integers(1, 400))
def test_questions_about_the_same_images_are_in_one_round_of_limited_size(prompts, limit):
    keys_of = {2 * number: keys for number, keys in enumerate(prompts)}
    found = planned(keys_of, limit)
    assert sorted(number for members in found for number in members) == sorted(keys_of)
    in_rounds = [[keys_of[number] for number in members] for members in found]
    for keys in set(prompts):
        assert sum(keys in members for members in in_rounds) == 1
    for members in in_rounds:
        shown = {frozenset(key for key in keys if SIZES[key]) for keys in members} - {frozenset()}
        everything = frozenset().union(*shown)
        assert sum(SIZES[key] for key in everything) <= limit or everything in shown
