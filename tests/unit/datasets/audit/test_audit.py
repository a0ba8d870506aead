"""The whole audit: findings, leaks, vocabularies."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.cli import main
from lookonce.datasets.audit.corpus import Corpus
from lookonce.datasets.audit.report import to_text
from lookonce.datasets.majority import Majority
from lookonce.datasets.records import Turn, read_records
from lookonce.errors import UsageError
from lookonce.text import short_ends

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
    "answer-writing": ([("c.png", "What is it?", "A  polyp.")], "1 answer "),
    "label-order": ([("a.png", "Which hue?", "red; pink"), ("c.png", "Which hue?", "pink; red")], "1 answer wrong"),
    "separators": ([("a.png", "Which hue?", "red; pink"), ("c.png", "Which hue?", "blue;pink")], "in 2 ways"),
    "units": ([("a.png", "What size?", ">20mm"), ("c.png", "What size?", ">20")], "1 label "),
    "spelling": ([("a.png", "Is it polypoid?", "yes"), ("b.png", "Is it polyopid?", "yes"), ("c.png", "polypoid", "a")],
                 "1 word "),
    "constant-answers": ([(f"{n}.png", "Is it so?", "always") for n in range(20)], "1 question "),
    "images-missing": ([("nowhere.png", "What is it?", "polyp")], "1 of 3 images cannot be read"),
    "copies": ([("copy.png", "What is it?", "polyp")], "1 image "),
}  # fmt: skip


def codes_of(result):
    return {finding.code for finding in result.findings}


def test_clean_records_have_no_findings(folder, write, look):
    result = look(write(folder / "train.jsonl", CLEAN))
    assert result.findings == () and "No problems found" in to_text(result)


@pytest.mark.parametrize("code", DIRT)
def test_dirt_is_found_counted_and_reported(folder, code, write, look, finding_of):
    rows, says = DIRT[code]
    result = look(write(folder / "train.jsonl", CLEAN + rows))
    finding = finding_of(result, code)
    assert says in finding.says and finding.count >= 1 and finding.items and finding.examples
    assert finding.says in to_text(result)
    assert all(line in to_text(result) for line in finding.examples)


@pytest.mark.parametrize("code", ["contradictions", "duplicates", "missing-values", "empty-answers", "images-missing"])
def test_items_have_file_and_line(folder, code, write, look, finding_of):
    rows, _ = DIRT[code]
    finding = finding_of(look(write(folder / "train.jsonl", CLEAN + rows)), code)
    lines = {int(line) for line in re.findall(r"train\.jsonl:(\d+)", json.dumps(finding.items))}
    assert lines and max(lines) <= len(CLEAN) + len(rows) and lines & set(range(len(CLEAN) + 1, 10))


def test_answers_with_a_common_reference_do_not_contradict(folder, write, look, finding_of):
    rows = [("a.png", "What is it?", "one"), ("a.png", "What is it?", "two")]
    assert "contradictions" in codes_of(look(write(folder / "bare.jsonl", rows)))
    lines = [
        {"image_filename": image, "question": question, "answer": answer, "references": [answer, "one", "two"]}
        for image, question, answer in rows
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with_references = look(folder / "train.jsonl")
    assert "contradictions" not in codes_of(with_references)
    assert finding_of(with_references, "duplicates").count == 1


def test_label_order_and_case_do_not_contradict(folder, write, look):
    rows = [("a.png", "Which hue?", "red; pink"), ("a.png", "Which hue?", "Pink;red")]
    assert "contradictions" not in codes_of(look(write(folder / "train.jsonl", rows)))


def test_the_same_question_after_other_turns_is_another_question(folder, look):
    turns = [(Turn("A polyp?", "yes"), Turn("Why is that?", "x")), (Turn("A tube?", "no"), Turn("Why is that?", "y"))]
    lines = [{"images": ["a.png"], "turns": [dataclasses.asdict(turn) for turn in pair]} for pair in turns]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = look(folder / "train.jsonl")
    assert "contradictions" not in codes_of(result)
    assert (result.files[0].num_several_turns, result.num_questions) == (2, 4)


def test_images_are_identified_by_content_and_not_by_name(folder, write, look, finding_of):
    rows = [("b.png", "How many are there?", "1"), ("copy.png", "How many are there?", "2")]
    result = look(write(folder / "train.jsonl", rows))
    assert finding_of(result, "contradictions").count == 1
    assert (result.files[0].num_paths, result.files[0].num_images, result.num_images) == (2, 1, 1)


def test_json_has_all_items_and_text_a_few(folder, write, look):
    rows = [(name, f"Is it {number}?", answer) for number in range(9) for name in ("a.png",) for answer in "xy"]
    result = look(write(folder / "train.jsonl", rows))
    value = json.loads(json.dumps(result.to_json()))
    [finding] = [finding for finding in value["findings"] if finding["code"] == "contradictions"]
    assert len(finding["items"]) == finding["count"] == 9 and len(finding["examples"]) == 3
    assert "and 6 more" in to_text(result)


def test_errors_come_first(folder, write, look):
    rows = [row for dirty, _ in DIRT.values() for row in dirty]
    levels = [finding.level for finding in look(write(folder / "train.jsonl", CLEAN + rows)).findings]
    assert levels == sorted(levels, key=("error", "warning", "note").index) and set(levels) == {
        "error",
        "warning",
        "note",
    }


def test_text_only_records_and_several_images_are_counted(folder, look):
    lines = [
        {"images": [], "turns": [{"question": "What is a polyp?", "answer": "a growth"}]},
        {"images": ["a.png", "b.png"], "turns": [{"question": "Which is larger?", "answer": "none"}]},
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = look(folder / "train.jsonl")
    assert (result.files[0].num_text_only, result.files[0].num_several_images) == (1, 1)
    assert result.questions_per_image == {1: 2}
    assert "no image" in to_text(result)


def test_a_file_without_images_has_a_report(folder, look):
    line = {"images": [], "turns": [{"question": "What is a polyp?", "answer": "a growth"}]}
    (folder / "train.jsonl").write_text(json.dumps(line))
    assert "1 question about 0 images" in to_text(look(folder / "train.jsonl"))


def malformed_file(folder, write):
    path = write(folder / "train.jsonl", CLEAN)
    rows = [{"image_filename": "a.png", "question": f"Is it {n}?", "answer": n} for n in range(5)]
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in rows) + '{"question"\n')
    return path


def test_all_malformed_records_are_reported_by_kind(folder, write, look, finding_of):
    """An audit ended at the first one."""
    result = look(malformed_file(folder, write))
    finding = finding_of(result, "malformed")
    assert (finding.level, finding.count, result.files[0].num_malformed, result.num_questions) == ("error", 6, 6, 3)
    assert [item["count"] for item in finding.items] == [5, 1]
    assert "5 times: `answer` must be text that is not empty, got 0; put it into quotes" in finding.examples[0]
    assert "(train.jsonl:4, train.jsonl:5, train.jsonl:6 and 2 more)" in finding.examples[0]
    assert list(finding.items[0]["places"]) == [f"train.jsonl:{line}" for line in range(4, 9)]
    assert "malformed" in to_text(result).splitlines()[3]


def test_coerced_answers_are_counted(folder, write, look, finding_of):
    result = look(malformed_file(folder, write), coerce_answers=True)
    assert (finding_of(result, "coerced-answers").count, finding_of(result, "malformed").count) == (5, 1)
    assert result.num_questions == 8


def test_a_file_of_malformed_records_has_a_report(folder, look):
    (folder / "train.json").write_text('[{"answer": 1}, 2]')
    result = look(folder / "train.json")
    assert "0 questions about 0 images" in to_text(result) and "train.json: record 1" in to_text(result)


def test_images_that_cannot_be_read_are_not_counted_as_distinct(folder, write, look):
    """An audit called 975 images distinct when none could be read."""
    rows = [(f"nowhere-{n}.png", "Is there text?", "yes") for n in range(3)]
    none = look(write(folder / "train.jsonl", rows))
    assert (none.num_images, none.files[0].num_images, none.files[0].num_unusable) == (0, 0, 3)
    assert "3 questions about 3 images, 3 of which cannot be read." in to_text(none)
    some = look(write(folder / "train.jsonl", rows + CLEAN))
    assert (some.num_images, some.files[0].num_images, some.num_named_images) == (2, 2, 5)


def test_the_table_of_files_leaves_out_columns_of_what_is_rare(folder, write, look):
    header = to_text(look(write(folder / "train.jsonl", CLEAN))).splitlines()[3]
    assert header.split() == ["file", "records", "questions", "image", "names", "distinct"]


def test_the_memory_of_a_conversation_grows_with_its_turns_and_not_with_their_square(folder):
    turns = [{"question": f"Is it {number}?", "answer": "yes"} for number in range(4000)]
    (folder / "train.jsonl").write_text(json.dumps({"images": ["a.png"], "turns": turns}))
    tracemalloc.start()
    result = CliRunner().invoke(main, ["data", "audit", str(folder / "train.jsonl"), "--json"])
    peak, _ = tracemalloc.get_traced_memory()[1], tracemalloc.stop()
    assert result.exit_code == 0 and json.loads(result.stdout)["num_questions"] == 4000
    assert peak < 30e6  # 68 MB where each turn had those before it


def test_the_package_lists_its_modules(root):
    package = root / "datasets" / "audit"
    listed = re.findall(r"^(\w+) {2,}\w", ast.get_docstring(ast.parse((package / "__init__.py").read_text())), re.M)
    assert set(listed) == {path.stem for path in package.glob("*.py")} - {"__init__"}


def test_shared_images_are_found_under_other_names_too(folder, picture, write, look, finding_of):
    train = write(folder / "train.jsonl", [*CLEAN, ("c.png", "What is it?", "cecum")])
    test = write(folder / "test.jsonl", [("copy.png", "Is there text?", "yes"), ("new.png", "What is it?", "ileum")])
    (folder / "new.png").write_bytes(picture(9))
    result = look(train, test)
    [leak] = result.leaks
    assert (leak.num_images, leak.num_renamed, leak.num_asked_in_both, leak.num_answered_otherwise) == (1, 1, 1, 1)
    assert (leak.one.images_share, leak.other.images_share) == (pytest.approx(1 / 3), 0.5)
    assert (leak.one.questions_share, leak.other.questions_share) == (0.25, 0.5)
    assert finding_of(result, "leaks").level == "error"


def test_the_same_questions_about_other_images_are_no_leak(folder, write, look):
    train = write(folder / "train.jsonl", [("a.png", "What is it?", "polyp")])
    test = write(folder / "test.jsonl", [("b.png", "What is it?", "polyp")])
    assert look(train, test).leaks == ()


@settings(max_examples=15)
@given(data=st.data())
def test_leaks_are_the_intersections_of_the_files(data, tmp_path_factory, write, look):
    folder = tmp_path_factory.mktemp("leaks")
    names = {f"{number}.png" for number in range(6)}
    chosen = [data.draw(st.sets(st.sampled_from(sorted(names)), min_size=1)) for _ in range(3)]
    files = [write(folder / f"{n}.jsonl", [(i, "Is it so?", "yes") for i in sorted(c)]) for n, c in enumerate(chosen)]
    found = {(leak.one.file, leak.other.file): leak.num_images for leak in look(*files).leaks}
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = {(f"{a}.jsonl", f"{b}.jsonl"): len(chosen[a] & chosen[b]) for a, b in pairs if chosen[a] & chosen[b]}
    assert found == expected


def test_the_majority_baseline_counts_right_answers_of_the_other_file(folder, write, look):
    train = write(folder / "train.jsonl", [*CLEAN, ("c.png", "Is there text?", "no")])
    test = write(folder / "test.jsonl", [(f"{n}.png", q, "no") for n in "xyz" for q in ("Is there text?", "Never?")])
    [baseline] = look(train, test).baselines
    majority = Majority.of_records(read_records(train))
    turns = [turn for record in read_records(test) for turn in record.turns]
    assert baseline.num_right == sum(majority.answer(turn.question) == turn.answer for turn in turns)
    assert (baseline.learned_on, baseline.scored_on, baseline.num_questions) == ("train.jsonl", "test.jsonl", 6)


def test_in_a_single_file_a_question_asked_once_counts_as_unknown(folder, write, look):
    rows = [*CLEAN, ("c.png", "Is there text?", "no"), ("c.png", "Is it red?", "no"), ("c.png", "Who?", "a nurse")]
    [baseline] = look(write(folder / "train.jsonl", rows)).baselines
    assert (baseline.learned_on, baseline.scored_on) == ("train.jsonl", "train.jsonl")
    assert (baseline.num_right, baseline.num_questions) == (3, 6)


def test_questions_asked_once_are_counted_and_not_listed(folder, write, look):
    text = to_text(look(write(folder / "train.jsonl", [("a.png", f"What is {n}?", "yes") for n in "xyz"])))
    assert "3 questions asked once each" in text and "What is x?" not in text


def test_a_file_given_twice_is_refused(folder, write):
    train = write(folder / "train.jsonl", [("a.png", "Is there text?", "yes")])
    with pytest.raises(UsageError, match="given twice"):
        Corpus.read([train, folder / "." / "train.jsonl"])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/train.jsonl"], ["train.jsonl"]),
        (["a/train.jsonl", "a/test.jsonl"], ["train.jsonl", "test.jsonl"]),
        (["a/x.jsonl", "b/x.jsonl"], ["a/x.jsonl", "b/x.jsonl"]),
    ],
)
def test_short_names_are_as_short_as_tells_files_apart(paths, names):
    assert short_ends([Path(path) for path in paths]) == names


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["test.jsonl", "train.jsonl", "val.jsonl"], ["train.jsonl", "test.jsonl", "val.jsonl"]),
        (["b.jsonl", "a.jsonl"], ["b.jsonl", "a.jsonl"]),
    ],
)
def test_the_file_named_train_else_the_first_is_trained_on(folder, named, expected, write):
    row = {"image_filename": "a.png", "question": "q", "answer": "a"}
    corpus = Corpus.read([write(folder / name, [row]) for name in named])
    assert [file.name for file in corpus.files] == expected
