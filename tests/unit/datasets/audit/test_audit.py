"""An audit finds what is wrong with records, says where, and says nothing about what is right."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import random
import re
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lookonce.datasets.audit.audit import Audit, audit
from lookonce.datasets.audit.corpus import Material, short_names
from lookonce.datasets.audit.findings import Finding
from lookonce.datasets.audit.labels import plain, same_labels
from lookonce.datasets.audit.pictures import look_at_pictures
from lookonce.datasets.audit.questions import asked
from lookonce.datasets.audit.report import grouped, to_text
from lookonce.datasets.audit.spelling import is_slip, is_swap, look_alikes
from lookonce.datasets.images import index_images
from lookonce.datasets.records import Record, Turn, read_records
from lookonce.errors import UsageError
from lookonce.eval.scores.metrics import Majority

Row = tuple[str, str, str]
"""Image, question, answer."""
WORDS = st.text("abcdeimnrstu", min_size=5, max_size=9)


def picture(seed: int, size: tuple[int, int] = (48, 40)) -> bytes:
    """A PNG of one colour, another for each seed."""
    target = io.BytesIO()
    Image.new("RGB", size, (seed % 256, seed // 256, 7)).save(target, "PNG")
    return target.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four images, `b.png` and `copy.png` with the same bytes."""
    for name, seed in {"a": 1, "b": 2, "c": 3, "copy": 2}.items():
        (tmp_path / f"{name}.png").write_bytes(picture(seed))
    return tmp_path


def write(path: Path, rows: Iterable[Row]) -> Path:
    lines = [{"image_filename": image, "question": q, "answer": a} for image, q, a in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def look(*paths: Path, **options: Any) -> Audit:
    return audit(Material.read(paths, **options))


def of(result: Audit, code: str) -> Finding:
    [finding] = [finding for finding in result.findings if finding.code == code]
    return finding


def codes(result: Audit) -> set[str]:
    return {finding.code for finding in result.findings}


CLEAN = [("a.png", "Is there text?", "yes"), ("b.png", "Is there text?", "no"), ("a.png", "What is it?", "a polyp")]

DIRT: dict[str, tuple[list[Row], str]] = {
    "contradictions": ([("c.png", "How many are there?", "1"), ("c.png", "How many are there?", "2")], "1 question "),
    "duplicates": ([("b.png", "Is there text?", "no")], "1 question "),
    "missing-values": ([("c.png", "Which one is it?", "nan"), ("c.png", "none", "x")], "2 questions "),
    "short-questions": ([("c.png", "Text?", "yes")], "1 question "),
    "empty-answers": ([("c.png", "What is it?", "-")], "1 question "),
    "answer-spaces": ([("c.png", "What is it?", "polyp ")], "1 question "),
    "special-tokens": ([("c.png", "What is it<|im_end|>?", "polyp")], "1 question "),
    "image-marks": ([("c.png", "<image>\nWhat is it?", "polyp")], "1 question "),
    "answer-writing": ([("c.png", "What is it?", "A  polyp.")], "1 answer "),
    "label-order": ([("a.png", "Which hue?", "red; pink"), ("c.png", "Which hue?", "pink; red")], "1 answer wrong"),
    "separators": ([("a.png", "Which hue?", "red; pink"), ("c.png", "Which hue?", "blue;pink")], "in 2 ways"),
    "units": ([("a.png", "What size?", ">20mm"), ("c.png", "What size?", ">20")], "1 label "),
    "spelling": ([("a.png", "Is it polypoid?", "yes"), ("b.png", "Is it polyopid?", "yes"), ("c.png", "polypoid", "a")],
                 "1 word "),
    "constant-answers": ([(f"{n}.png", "Is it so?", "always") for n in range(20)], "1 question "),
    "images-missing": ([("nowhere.png", "What is it?", "polyp")], "1 of 3 images can not be read"),
    "copies": ([("copy.png", "What is it?", "polyp")], "1 image "),
}  # fmt: skip


def test_what_is_right_is_not_found_fault_with(folder):
    result = look(write(folder / "train.jsonl", CLEAN))
    assert result.findings == () and "Nothing wrong was found" in to_text(result)


@pytest.mark.parametrize("code", DIRT)
def test_dirt_is_found_counted_and_placed(folder, code):
    rows, says = DIRT[code]
    result = look(write(folder / "train.jsonl", CLEAN + rows))
    finding = of(result, code)
    assert says in finding.says and finding.count >= 1 and finding.items and finding.examples
    assert finding.says in to_text(result)
    assert all(line in to_text(result) for line in finding.examples)


@pytest.mark.parametrize("code", ["contradictions", "duplicates", "missing-values", "empty-answers", "images-missing"])
def test_places_name_file_and_line(folder, code):
    rows, _ = DIRT[code]
    finding = of(look(write(folder / "train.jsonl", CLEAN + rows)), code)
    lines = {int(line) for line in re.findall(r"train\.jsonl:(\d+)", json.dumps(finding.items))}
    assert lines and max(lines) <= len(CLEAN) + len(rows) and lines & set(range(len(CLEAN) + 1, 10))


def test_answers_that_are_references_of_each_other_do_not_contradict(folder):
    rows = [("a.png", "What is it?", "one"), ("a.png", "What is it?", "two")]
    assert "contradictions" in codes(look(write(folder / "bare.jsonl", rows)))
    lines = [
        {"image_filename": image, "question": question, "answer": answer, "references": [answer, "one", "two"]}
        for image, question, answer in rows
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with_references = look(folder / "train.jsonl")
    assert "contradictions" not in codes(with_references)
    assert of(with_references, "duplicates").count == 1


def test_label_order_and_writing_do_not_contradict(folder):
    rows = [("a.png", "Which hue?", "red; pink"), ("a.png", "Which hue?", "Pink;red")]
    assert "contradictions" not in codes(look(write(folder / "train.jsonl", rows)))


def test_the_same_words_in_another_conversation_are_another_question(folder):
    turns = [(Turn("A polyp?", "yes"), Turn("Why is that?", "x")), (Turn("A tube?", "no"), Turn("Why is that?", "y"))]
    lines = [{"images": ["a.png"], "turns": [dataclasses.asdict(turn) for turn in pair]} for pair in turns]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = look(folder / "train.jsonl")
    assert "contradictions" not in codes(result)
    assert (result.files[0].num_several_turns, result.num_questions) == (2, 4)


def test_images_are_one_by_content_and_not_by_name(folder):
    rows = [("b.png", "How many are there?", "1"), ("copy.png", "How many are there?", "2")]
    result = look(write(folder / "train.jsonl", rows))
    assert of(result, "contradictions").count == 1
    assert (result.files[0].num_paths, result.files[0].num_images, result.num_images) == (2, 1, 1)


def test_files_that_share_images_leak_under_other_names_too(folder):
    train = write(folder / "train.jsonl", [*CLEAN, ("c.png", "What is it?", "cecum")])
    test = write(folder / "test.jsonl", [("copy.png", "Is there text?", "yes"), ("new.png", "What is it?", "ileum")])
    (folder / "new.png").write_bytes(picture(9))
    result = look(train, test)
    [leak] = result.leaks
    assert (leak.num_images, leak.num_renamed, leak.num_asked_in_both, leak.num_answered_otherwise) == (1, 1, 1, 1)
    assert (leak.one.images_share, leak.other.images_share) == (pytest.approx(1 / 3), 0.5)
    assert (leak.one.questions_share, leak.other.questions_share) == (0.25, 0.5)
    assert of(result, "leaks").level == "error"


def test_files_that_ask_the_same_about_other_images_do_not_leak(folder):
    train = write(folder / "train.jsonl", [("a.png", "What is it?", "polyp")])
    test = write(folder / "test.jsonl", [("b.png", "What is it?", "polyp")])
    assert look(train, test).leaks == ()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_leaks_are_the_intersections_of_the_files(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaks")
    names = {f"{number}.png" for number in range(6)}
    chosen = [data.draw(st.sets(st.sampled_from(sorted(names)), min_size=1)) for _ in range(3)]
    files = [write(folder / f"{n}.jsonl", [(i, "Is it so?", "yes") for i in sorted(c)]) for n, c in enumerate(chosen)]
    found = {(leak.one.file, leak.other.file): leak.num_images for leak in look(*files).leaks}
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = {(f"{a}.jsonl", f"{b}.jsonl"): len(chosen[a] & chosen[b]) for a, b in pairs if chosen[a] & chosen[b]}
    assert found == expected


def test_baselines_are_those_of_an_evaluation(folder):
    train = write(folder / "train.jsonl", [*CLEAN, ("c.png", "Is there text?", "no")])
    test = write(folder / "test.jsonl", [(f"{n}.png", q, "no") for n in "xyz" for q in ("Is there text?", "Never?")])
    [baseline] = look(train, test).baselines
    majority = Majority(read_records(train))
    turns = [turn for record in read_records(test) for turn in record.turns]
    assert baseline.num_right == sum(majority.answer(turn.question) == turn.answer for turn in turns)
    assert (baseline.learned_on, baseline.scored_on, baseline.num_questions) == ("train.jsonl", "test.jsonl", 6)


def test_within_a_file_a_question_asked_once_is_answered_as_one_never_seen(folder):
    rows = [*CLEAN, ("c.png", "Is there text?", "no"), ("c.png", "Is it red?", "no"), ("c.png", "Who?", "nobody")]
    [baseline] = look(write(folder / "train.jsonl", rows)).baselines
    assert (baseline.learned_on, baseline.scored_on) == ("train.jsonl", "train.jsonl")
    assert (baseline.num_right, baseline.num_questions) == (3, 6)


def test_questions_asked_once_are_counted_and_not_listed(folder):
    text = to_text(look(write(folder / "train.jsonl", [("a.png", f"What is {n}?", "yes") for n in "xyz"])))
    assert "3 questions asked once each" in text and "What is x?" not in text


def broken_images(folder: Path) -> dict[str, str]:
    """Files that are no images, and why."""
    whole = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(whole, "JPEG")
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_bytes(b"not an image")
    (folder / "cut.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    return {"empty.png": "is empty", "text.png": "no known image format", "cut.jpg": "truncated"}


@pytest.mark.parametrize("decode", [False, True])
def test_broken_images_are_named_with_reason_and_record(folder, decode):
    reasons = broken_images(folder)
    if not decode:
        del reasons["cut.jpg"]
    rows = [(name, "What is it?", "polyp") for name in ("a.png", "empty.png", "text.png", "cut.jpg")]
    finding = of(look(write(folder / "train.jsonl", rows), decode=decode), "images-broken")
    assert {Path(item["image"]).name for item in finding.items} == reasons.keys()
    for item in finding.items:
        assert reasons[Path(item["image"]).name] in item["reason"] and item["place"].startswith("train.jsonl:")


def test_images_of_a_strange_size_are_told(folder):
    (folder / "flat.png").write_bytes(picture(5, (400, 31)))
    (folder / "long.png").write_bytes(picture(5, (6433, 32)))
    rows = [(name, "What is it?", "polyp") for name in ("a.png", "flat.png", "long.png")]
    reasons = [item["reason"] for item in of(look(write(folder / "train.jsonl", rows)), "images-odd").items]
    assert len(reasons) == 2 and "less than 32" in "".join(reasons) and "more than 200 times" in "".join(reasons)


def test_where_no_image_is_there_it_is_said_in_a_line(folder):
    rows = [(f"images/{number}.png", "What is it?", "polyp") for number in range(50)]
    text = to_text(look(write(folder / "train.jsonl", rows)))
    assert text.count("can not read image") == 1 and "none of 50 images can be read" in text
    assert "--image-root" in text


def test_pictures_come_in_the_order_in_which_caches_are_planned(folder):
    with tarfile.open(folder / "more.tar", "w") as tar:
        for number in (7, 5, 6):
            member = tarfile.TarInfo(f"{number}.png")
            member.size = len(picture(number))
            tar.addfile(member, io.BytesIO(picture(number)))
    names = ["copy.png", "more.tar/5.png", "a.png", "gone.png", "more.tar/7.png", "c.png", "more.tar/6.png", "b.png"]
    paths = [folder / name for name in names]
    index = index_images([Record((path,), ()) for path in paths])
    found = look_at_pictures(paths)
    assert {path: p.key for path, p in found.items() if p.key} == index.key_of
    assert list(dict.fromkeys(p.key for p in found.values() if p.key)) == list(index.path_of)
    assert [p.size for p in found.values() if p.key == index.key_of[paths[0]]] == [
        index.size_of[index.key_of[paths[0]]]
    ] * 2


def test_json_is_complete_where_text_names_a_few(folder):
    rows = [(name, f"Is it {number}?", answer) for number in range(9) for name in ("a.png",) for answer in "xy"]
    result = look(write(folder / "train.jsonl", rows))
    value = json.loads(json.dumps(result.to_json()))
    [finding] = [finding for finding in value["findings"] if finding["code"] == "contradictions"]
    assert len(finding["items"]) == finding["count"] == 9 and len(finding["examples"]) == 3
    assert "and 6 more" in to_text(result)


def test_errors_come_first(folder):
    rows = [row for dirty, _ in DIRT.values() for row in dirty]
    levels = [finding.level for finding in look(write(folder / "train.jsonl", CLEAN + rows)).findings]
    assert levels == sorted(levels, key=("error", "warning", "note").index) and set(levels) == {
        "error",
        "warning",
        "note",
    }


def test_text_only_records_and_several_images_are_counted(folder):
    lines = [
        {"images": [], "turns": [{"question": "What is a polyp?", "answer": "a growth"}]},
        {"images": ["a.png", "b.png"], "turns": [{"question": "Which is larger?", "answer": "none"}]},
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = look(folder / "train.jsonl")
    assert (result.files[0].num_text_only, result.files[0].num_several_images) == (1, 1)
    assert result.questions_per_image == {1: 2}
    assert "no image" in to_text(result)


def test_a_file_of_text_alone_has_a_report(folder):
    line = {"images": [], "turns": [{"question": "What is a polyp?", "answer": "a growth"}]}
    (folder / "train.jsonl").write_text(json.dumps(line))
    assert "1 question about 0 images" in to_text(look(folder / "train.jsonl"))


def test_a_file_named_twice_is_refused(folder):
    train = write(folder / "train.jsonl", CLEAN)
    with pytest.raises(UsageError, match="named twice"):
        Material.read([train, folder / "." / "train.jsonl"])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/train.jsonl"], ["train.jsonl"]),
        (["a/train.jsonl", "a/test.jsonl"], ["train.jsonl", "test.jsonl"]),
        (["a/x.jsonl", "b/x.jsonl"], ["a/x.jsonl", "b/x.jsonl"]),
    ],
)
def test_files_are_called_as_short_as_tells_them_apart(paths, names):
    assert short_names([Path(path) for path in paths]) == names


@given(st.lists(st.sampled_from(["red", "pink", "Flesh", "blue green"]), min_size=1), st.randoms(use_true_random=False))
def test_order_separators_and_case_leave_labels_the_same(labels, rng: random.Random):
    shuffled = rng.sample(labels, len(labels))
    written = rng.choice([";", "; ", " ; "]).join(label.upper() if rng.random() < 0.5 else label for label in shuffled)
    assert same_labels(written) == same_labels("; ".join(labels))


@given(st.text())
def test_what_is_plain_stays_as_it_is(text):
    assert plain(plain(text)) == plain(text)


@given(WORDS, st.integers(0, 8))
def test_neighbours_changed_round_are_a_swap_and_nothing_else(word, place):
    place %= len(word) - 1
    swapped = word[:place] + word[place + 1] + word[place] + word[place + 2 :]
    assert is_swap(word, swapped) == (word != swapped) == is_swap(swapped, word)
    assert not is_swap(word, word) and not is_slip(word, swapped)


@given(WORDS, st.integers(0, 8), st.sampled_from("xyz"))
def test_a_letter_more_less_or_other_is_a_slip_unless_it_may_be_grammar(word, place, letter):
    place %= len(word)
    more, other = word[:place] + letter + word[place:], word[:place] + letter + word[place + 1 :]
    assert is_slip(word, more) == is_slip(more, word) == (place < len(more) - 2)
    assert is_slip(word, other) == (place < len(word) - 2)
    assert not is_slip(word, word)


@given(st.dictionaries(WORDS, st.integers(1, 100), max_size=30))
def test_all_pairs_of_look_alikes_are_found_without_comparing_all(words):
    def related(word: str) -> int:
        return sum(number for other, number in words.items() if other.removesuffix("s") == word.removesuffix("s"))

    def misspelt(wrong: str, right: str) -> bool:
        swapped = is_swap(wrong, right) and related(right) > related(wrong)
        return swapped or (
            related(wrong) <= related(right) and is_slip(wrong, right) and words[right] >= 20 * words[wrong]
        )

    expected = {(wrong, right) for wrong in words for right in words if misspelt(wrong, right)}
    assert set(look_alikes(words)) == expected


@pytest.mark.parametrize(("one", "other"), [("polyp", "polyps"), ("detect", "detected"), ("visible", "visibly")])
def test_grammar_is_no_misspelling(one, other):
    assert not list(look_alikes({one: 100, other: 1}))


@given(st.dictionaries(st.integers(0, 10_000), st.integers(1, 9), min_size=1), st.integers(1, 40))
def test_ranges_hold_every_number_once(counts, num_groups):
    groups = grouped(counts, num_groups)
    assert len(groups) <= num_groups and sum(number for _, number in groups) == sum(counts.values())


def test_the_package_lists_its_files(root):
    package = root / "datasets" / "audit"
    listed = re.findall(r"^(\w+) {2,}\w", ast.get_docstring(ast.parse((package / "__init__.py").read_text())), re.M)
    assert set(listed) == {path.stem for path in package.glob("*.py")} - {"__init__"}


@pytest.fixture
def real(real_records: Path) -> Path:
    """8,786 real rows without images."""
    path = real_records.with_name("val.jsonl")
    if not path.exists():
        pytest.skip(f"no {path}")
    return path


def test_on_real_rows_it_finds_what_is_there(real):
    rows = [json.loads(line) for line in real.read_text().splitlines()]
    result = look(real)
    asked_twice: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        asked_twice.setdefault((row["image_filename"], row["question"]), []).append(row["answer"])
    repeated = [answers for answers in asked_twice.values() if len(answers) > 1]
    differing = sum(len({frozenset(re.split("; ?", answer)) for answer in answers}) > 1 for answers in repeated)
    assert differing and of(result, "contradictions").count == differing
    assert of(result, "duplicates").count == len(repeated) - differing
    assert of(result, "missing-values").count == sum(row["question"] == "none" for row in rows) > 0
    words = {item["word"]: item["like"] for item in of(result, "spelling").items}
    assert words == {"instrumnets": "instruments", "rigth": "right"}
    assert {">20", ">20mm"} in [set(item["answers"]) for item in of(result, "units").items]
    assert {item["separator"] for item in of(result, "separators").items} == {";", "; "}
    assert {"pink; red", "red; pink"} in [set(item["answers"]) for item in of(result, "label-order").items]
    assert of(result, "images-missing").count == len({row["image_filename"] for row in rows})
    assert result.num_distinct_questions == len({row["question"] for row in rows})
    per_image = Counter(Counter(row["image_filename"] for row in rows).values())
    assert result.questions_per_image == dict(sorted(per_image.items()))
    assert to_text(result).count("can not read image") == 1


def test_on_real_rows_the_majority_answer_scores_what_counting_says(real):
    by_question: dict[str, Counter[str]] = {}
    for one in asked(Material.read([real])):
        by_question.setdefault(one.question, Counter())[one.answer] += 1
    right = sum(counts.most_common(1)[0][1] for counts in by_question.values())
    assert look(real).baselines[0].num_right == right


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["test.jsonl", "train.jsonl", "val.jsonl"], ["train.jsonl", "test.jsonl", "val.jsonl"]),
        (["b.jsonl", "a.jsonl"], ["b.jsonl", "a.jsonl"]),
    ],
)
def test_the_file_that_says_so_is_the_one_trained_on_else_the_first(folder, named, expected):
    row = {"image_filename": "a.png", "question": "q", "answer": "a"}
    material = Material.read([write(folder / name, [row]) for name in named])
    assert [file.name for file in material.files] == expected
