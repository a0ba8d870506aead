"""The whole audit: findings, images that are missing, broken or odd, leaks, answers, and the majority baseline."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.rows import encoded, png, run

from lookonce.datasets.audit.audit import to_text
from lookonce.datasets.audit.findings import Corpus, normal_labels
from lookonce.datasets.balance import Majority
from lookonce.datasets.records import Record, Turn, read_records
from lookonce.errors import UsageError

Row = tuple[str, str, str]
"""Image, question, answer."""
CLEAN = [("a.png", "Is there text?", "yes"), ("b.png", "Is there text?", "no"), ("a.png", "What is it?", "a polyp")]

DIRT: dict[str, tuple[list[Row], str]] = {
    "contradictions": ([("c.png", "How many are there?", "1"), ("c.png", "How many are there?", "2")], "1 question "),
    "duplicates": ([("b.png", "Is there text?", "no")], "1 question "),
    "missing-values": ([("c.png", "Which one is it?", "nan"), ("c.png", "none", "x")], "2 questions "),
    "short-questions": ([("c.png", "Text?", "yes")], "1 question "),
    "empty-answers": ([("c.png", "What is it?", "-")], "1 question "),
    "answer-spaces": ([("c.png", "What is it?", "polyp ")], "1 question "),
    "special-tokens": ([("c.png", "What is it<|eot_id|>?", "polyp")], "1 question "),
    "image-marks": ([("c.png", "<image>\nWhat is it?", "polyp")], "1 question "),
    "constant-answers": ([(f"{n}.png", "Is it so?", "always") for n in range(20)], "1 question "),
    "images-missing": ([("nowhere.png", "What is it?", "polyp")], "1 of 3 images cannot be read"),
    "copies": ([("copy.png", "What is it?", "polyp")], "1 image "),
}  # fmt: skip


def test_clean_records_have_no_findings_and_no_columns_of_what_is_rare(look_at):
    result = look_at(*CLEAN)
    text = to_text(result)
    assert result.findings == () and "No problems found" in text
    assert text.splitlines()[3].split() == ["file", "records", "questions", "image", "names", "distinct"]


WITH_LINES = ("contradictions", "duplicates", "missing-values", "empty-answers", "images-missing")


@pytest.mark.parametrize("code", DIRT)
def test_dirt_is_found_counted_and_reported_with_file_and_line(code, look_at, finding_of):
    rows, says = DIRT[code]
    result = look_at(*CLEAN, *rows)
    finding = finding_of(result, code)
    assert says in finding.says and finding.count >= 1 and finding.items and finding.examples
    assert all(line in to_text(result) for line in (finding.says, *finding.examples))
    lines = {int(line) for line in re.findall(r"train\.jsonl:(\d+)", json.dumps(finding.items))}
    if code in WITH_LINES:
        assert lines and max(lines) <= len(CLEAN) + len(rows) and lines & set(range(len(CLEAN) + 1, 10))


def test_answers_with_a_common_reference_do_not_contradict(look_at, finding_of):
    rows = [("a.png", "What is it?", "one"), ("a.png", "What is it?", "two")]
    assert finding_of(look_at(*rows), "contradictions").count == 1
    row = {"image_filename": "a.png", "question": "What is it?", "references": ["one", "two"]}
    [finding] = look_at(*(row | {"answer": answer} for answer in ("one", "two"))).findings
    assert (finding.code, finding.count) == ("duplicates", 1)


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"question": question, "answer": answer} for question, answer in pairs]


def test_the_same_question_after_other_turns_is_another_question(look_at):
    talks = [turns(("A polyp?", "yes"), ("Why is that?", "x")), turns(("A tube?", "no"), ("Why is that?", "y"))]
    result = look_at(*({"images": ["a.png"], "turns": talk} for talk in talks))
    assert "contradictions" not in {finding.code for finding in result.findings}
    assert (result.files[0].num_several_turns, result.num_questions) == (2, 4)


def test_images_are_identified_by_content_and_not_by_name(look_at, finding_of):
    result = look_at(("b.png", "How many are there?", "1"), ("copy.png", "How many are there?", "2"))
    assert finding_of(result, "contradictions").count == 1
    assert (result.files[0].num_paths, result.files[0].num_images, result.num_images) == (2, 1, 1)


def test_json_has_all_items_and_text_a_few(look_at):
    result = look_at(*(("a.png", f"Is it {number}?", answer) for number in range(9) for answer in "xy"))
    value = json.loads(json.dumps(result.to_json()))
    [finding] = value["findings"]
    assert len(finding["items"]) == finding["count"] == 9 and len(finding["examples"]) == 3
    assert "and 6 more" in to_text(result)


def test_errors_come_first(look_at):
    rows = [row for dirty, _ in DIRT.values() for row in dirty]
    levels = [finding.level for finding in look_at(*CLEAN, *rows).findings]
    order = ("error", "warning", "note")
    assert levels == sorted(levels, key=order.index) and set(levels) == set(order)


def test_text_only_records_and_several_images_are_counted(look_at):
    text_only = {"images": [], "turns": turns(("What is a polyp?", "a growth"))}
    result = look_at(text_only, {"images": ["a.png", "b.png"], "turns": turns(("Which is larger?", "none"))})
    assert (result.files[0].num_text_only, result.files[0].num_several_images) == (1, 1)
    assert result.questions_per_image == {1: 2} and "no image" in to_text(result)
    assert "1 question about 0 images" in to_text(look_at(text_only))


def test_all_malformed_records_are_reported_by_kind(write, look, finding_of):
    numbers = [{"image_filename": "a.png", "question": f"Is it {n}?", "answer": n} for n in range(5)]
    path = write(*CLEAN, *numbers)
    path.write_text(path.read_text() + '{"question"\n')
    result = look(path)
    finding = finding_of(result, "malformed")
    assert (finding.level, finding.count, result.files[0].num_malformed, result.num_questions) == ("error", 6, 6, 3)
    assert [item["count"] for item in finding.items] == [5, 1]
    assert "5 times: `answer` must be text that is not empty, got 0; put it into quotes" in finding.examples[0]
    assert "(train.jsonl:4, train.jsonl:5, train.jsonl:6 and 2 more)" in finding.examples[0]
    assert list(finding.items[0]["places"]) == [f"train.jsonl:{line}" for line in range(4, 9)]
    assert "malformed" in to_text(result).splitlines()[3]


def test_images_that_cannot_be_read_are_not_counted_as_distinct(look_at):
    rows = [(f"nowhere-{n}.png", "Is there text?", "yes") for n in range(3)]
    none = look_at(*rows)
    text = to_text(none)
    assert (none.num_images, none.files[0].num_images, none.files[0].num_unusable) == (0, 0, 3)
    assert "3 questions about 3 images, 3 of which cannot be read." in text and "--image-root" in text
    assert text.count("cannot read image") == 1 and "3 of 3 images cannot be read" in text
    some = look_at(*rows, *CLEAN)
    assert (some.num_images, some.files[0].num_images, some.num_named_images) == (2, 2, 5)


def test_the_memory_of_a_conversation_grows_with_its_turns_and_not_with_their_square(write, look):
    path = write({"images": ["a.png"], "turns": turns(*((f"Is it {number}?", "yes") for number in range(4000)))})
    tracemalloc.start()
    num_questions = look(path).num_questions
    peak, _ = tracemalloc.get_traced_memory()[1], tracemalloc.stop()
    assert num_questions == 4000 and peak < 30e6  # 68 MB where each turn had those before it


def test_shared_images_are_found_under_other_names_too(folder, write, look, finding_of):
    train = write(*CLEAN, ("c.png", "What is it?", "cecum"))
    test = write(("copy.png", "Is there text?", "yes"), ("new.png", "What is it?", "ileum"), name="test")
    (folder / "new.png").write_bytes(png(9))
    result = look(train, test)
    [leak] = result.leaks
    assert (leak.num_images, leak.num_renamed, leak.num_asked_in_both) == (1, 1, 1)
    assert (leak.file_share, leak.other_share) == (pytest.approx(1 / 3), 0.5)
    assert finding_of(result, "leaks").level == "error"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_leaks_are_the_images_and_not_the_questions_that_files_share(data, write, look):
    names = [f"{number}.png" for number in range(6)]
    chosen = [data.draw(st.sets(st.sampled_from(names), min_size=1)) for _ in range(3)]
    files = [write(*((i, "Is it so?", "yes") for i in sorted(c)), name=str(n)) for n, c in enumerate(chosen)]
    found = {(leak.file, leak.other): leak.num_images for leak in look(*files).leaks}
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = {(f"{a}.jsonl", f"{b}.jsonl"): len(chosen[a] & chosen[b]) for a, b in pairs if chosen[a] & chosen[b]}
    assert found == expected


def test_the_majority_baseline_counts_right_answers_of_the_other_file(write, look):
    train = write(*CLEAN, ("c.png", "Is there text?", "no"))
    test = write(*((f"{n}.png", q, "no") for n in "xyz" for q in ("Is there text?", "Never?")), name="test")
    [baseline] = look(train, test).baselines
    majority = Majority.of_records(read_records(train))
    asked = [turn for record in read_records(test) for turn in record.turns]
    assert baseline.num_right == sum(majority.answer(turn.question) == turn.answer for turn in asked)
    assert (baseline.learned_on, baseline.scored_on, baseline.num_questions) == ("train.jsonl", "test.jsonl", 6)


def test_in_a_single_file_a_question_asked_once_counts_as_unknown(look_at):
    rows = [("c.png", "Is there text?", "no"), ("c.png", "Is it red?", "no"), ("c.png", "Who?", "a nurse")]
    [baseline] = look_at(*CLEAN, *rows).baselines
    assert (baseline.learned_on, baseline.scored_on) == ("train.jsonl", "train.jsonl")
    assert (baseline.num_right, baseline.num_questions) == (3, 6)


def test_questions_asked_once_are_counted_and_not_listed(look_at):
    text = to_text(look_at(*(("a.png", f"What is {n}?", "yes") for n in "xyz")))
    assert "3 questions asked once each" in text and "What is x?" not in text


def test_a_file_given_twice_is_refused(folder, write):
    with pytest.raises(UsageError, match="given twice"):
        Corpus.read([write(*CLEAN), folder / "." / "train.jsonl"])


def test_the_file_named_train_else_the_first_is_trained_on(write):
    for named, first in ((["test", "train", "val"], "train.jsonl"), (["b", "a"], "b.jsonl")):
        corpus = Corpus.read([write(("a.png", "q", "a"), name=name) for name in named])
        assert corpus.files[0].name == first


@given(st.lists(st.sampled_from(["red", "pink", "Flesh", "blue green"]), min_size=1), st.randoms(use_true_random=False))
def test_order_separators_and_case_leave_labels_the_same(labels, rng):
    shuffled = rng.sample(labels, len(labels))
    written = rng.choice([";", "; ", " ; "]).join(label.upper() if rng.random() < 0.5 else label for label in shuffled)
    assert normal_labels(written) == normal_labels("; ".join(labels))


@pytest.mark.parametrize("part", ["a;", "e\u0301"])
def test_an_audit_of_long_texts_takes_linear_time(folder, write, part):
    long = f"x{part * (200_000 // len(part))}x"
    path = write(("a.png", "Is it?", long), ("a.png", long, "a"))
    start = time.process_time()
    result = run("data", "audit", path, "--html", folder / "a.html")
    assert result.exit_code == 0 and time.process_time() - start < 3


@pytest.mark.parametrize("decode", [False, True])
def test_broken_images_are_reported_with_reason_and_record(folder, decode, look_at, finding_of):
    whole = encoded(Image.effect_noise((200, 200), 90), "JPEG")
    contents = {"empty.png": b"", "text.png": b"not an image", "cut.jpg": whole[: len(whole) // 2]}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    reasons = {"empty.png": "is empty", "text.png": "unknown image format"}
    reasons |= {"cut.jpg": "truncated"} if decode else {}
    rows = [(name, "What is it?", "polyp") for name in ("a.png", "empty.png", "text.png", "cut.jpg")]
    finding = finding_of(look_at(*rows, decode=decode), "images-broken")
    assert {Path(item["image"]).name for item in finding.items} == reasons.keys()
    for item in finding.items:
        assert reasons[Path(item["image"]).name] in item["reason"] and item["place"].startswith("train.jsonl:")


def test_images_of_an_odd_size_are_reported(folder, look_at, finding_of):
    (folder / "flat.png").write_bytes(png(5, (400, 31)))
    rows = [(name, "What is it?", "polyp") for name in ("a.png", "flat.png")]
    [item] = finding_of(look_at(*rows), "images-odd").items
    assert item["reason"] == "400 x 31 pixels, less than 32 on a side"


NOISE = Image.effect_noise((64, 48), 90)
FRAMES = {"save_all": True, "append_images": [Image.effect_noise((64, 48), 50)]}
TRAITS = {
    "rgba.png": ("images-alpha", "warning", NOISE.convert("RGBA"), {}),
    "palette.png": ("images-transparent", "warning", NOISE.convert("P"), {"transparency": 3}),
    "rgb.png": ("images-transparent", "warning", NOISE.convert("RGB"), {"transparency": (1, 2, 3)}),
    "deep.png": ("images-deep", "warning", NOISE.convert("I;16"), {}),
    "integers.tif": ("images-deep", "warning", NOISE.convert("I"), {}),
    "frames.gif": ("images-animated", "warning", NOISE, FRAMES),
    "pages.tif": ("images-animated", "warning", NOISE, FRAMES),
    "inks.jpg": ("images-cmyk", "note", NOISE.convert("CMYK"), {}),
    "plain.jpg": (None, None, NOISE.convert("RGB"), {}),
    "lab.tif": (None, None, Image.new("LAB", (64, 48), (90, 3, 4)), {}),
    "stereo.mpo": (None, None, NOISE.convert("RGB"), FRAMES),
}


@pytest.mark.parametrize("name", TRAITS)
def test_what_8_bit_rgb_does_not_keep_of_an_image_is_reported(folder, look_at, name):
    code, level, image, options = TRAITS[name]
    image.save(folder / name, **options)
    rows = [("a.png", "What is it?", "polyp"), (name, "What is it?", "polyp")]
    findings = [one for one in look_at(*rows).findings if one.code.startswith("images-")]
    assert [(one.code, one.level, one.count) for one in findings] == ([(code, level, 1)] if code else [])
    for one in findings:
        assert one.says.startswith("1 image ") and name in one.examples[0] and "mode " in one.examples[0]


ASKED = [("a", "1"), ("a", "2"), ("a", "2"), ("b", "3"), ("b", "3"), ("b", "3"), ("b", "1"), ("c", "4")]


def test_the_answer_is_the_most_frequent_one_of_each_question_and_of_equally_frequent_ones_the_first():
    majority = Majority.of_records([Record((), (Turn(*pair),)) for pair in ASKED])
    assert [majority.answer(question) for question in "abc"] == ["2", "3", "4"]
    assert Majority([("a", "2"), ("a", "1"), ("a", "1"), ("a", "2")]).answer("a") == "2"


def test_an_unknown_question_or_one_asked_too_seldom_gets_the_most_frequent_answer_of_all():
    assert Majority(ASKED).answer("never asked") == "3"
    assert Majority([]).answer("never asked") == ""
    assert [Majority(ASKED, min_asked).answer("c") for min_asked in (1, 2)] == ["4", "3"]
