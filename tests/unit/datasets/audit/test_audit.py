"""An audit finds what is wrong with records and says where, and finds nothing wrong with clean ones."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import tracemalloc

import pytest
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.datasets.audit.report import to_text
from lookonce.datasets.records import Turn

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
