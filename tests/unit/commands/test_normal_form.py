"""Texts that differ in Unicode's normal form alone are the same text in every command that compares texts.

Tokenizers of Qwen normalise to NFC, so a model writes NFC; records made on macOS or from PDF files have NFD.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from PIL import Image
from support.rows import run

from lookonce.datasets.balance import Majority
from lookonce.datasets.context import ContextForm, with_context
from lookonce.datasets.records import Record, Turn
from lookonce.eval.join import Run, route
from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import read_predictions, training_answers

ONE, OTHER = (normalize(form, "séssile; größe Ω") for form in ("NFC", "NFD"))
ASKED, ASKED_TOO = (normalize(form, "Quelle lésion?") for form in ("NFC", "NFD"))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def prediction(number: int, question: str, answer: str, predicted: str, **values: Any) -> dict[str, Any]:
    row = {"origin": f"val.jsonl:{number}", "images": [f"{number}.png"], "image_keys": [f"{number:064x}"]}
    texts = {"question": question, "answer": answer, "predicted": predicted, "majority": predicted}
    return {"version": 1, "turn": 0, **row, **texts, **values}


@pytest.fixture
def predictions(tmp_path: Path) -> list[Path]:
    """Two files with the same right answers: all texts in NFC, and all but the model's in NFD."""
    same = [prediction(number, ASKED, ONE, ONE, category="é", references=[ONE]) for number in range(6)]
    changed = [prediction(number, ASKED_TOO, OTHER, ONE, category="e\u0301", references=[OTHER]) for number in range(6)]
    return [write(tmp_path / "nfc.jsonl", *same), write(tmp_path / "nfd.jsonl", *changed)]


def test_every_score_of_an_answer_is_that_of_the_same_text(predictions):
    one, other = (Evaluation.of(read_predictions(path), training_answers([])).to_json() for path in predictions)
    assert one == other and (one["overall"]["exact_match"], one["overall"]["majority"]) == (1, 1)
    assert [*one["by_question"]] == [ASKED]


def test_runs_are_joined_and_reported(predictions):
    result = run("compare", *predictions)
    assert result.exit_code == 0 and result.stdout.count("100.0%") >= 4, result.output
    f1 = run("compare", *predictions, "--metric", "token_f1")
    assert f1.exit_code == 0 and f1.stdout.count("100.0%") >= 4
    wrong = [
        write(path.with_stem(f"wrong-{path.stem}"), *({**json.loads(line), "predicted": given} for line in lines))
        for path, given in zip(predictions, ("né", "ne\u0301"), strict=True)
        if (lines := path.read_text().splitlines())
    ]
    result = run("report", *wrong, "-o", predictions[0].with_name("page.html"), "--json")
    assert result.exit_code == 0, result.output
    [confusion] = json.loads(result.stdout)["errors"]["confusions"]
    assert {*confusion["times"].values()} == {6}


def test_a_routed_variant_keeps_the_texts_as_they_were_written(predictions):
    answers = Run("a", read_predictions(predictions[1]), "a", 1)
    assert route({"e\u0301": answers}, "category")[0].answer == OTHER


def record(*turns: tuple[str, str], **metadata: Any) -> Record:
    return Record((Path("/a.png"),), tuple(Turn(*turn) for turn in turns), metadata=metadata)


def test_majority_answers_and_those_of_training_know_both_forms():
    records = [record((ASKED, "b"), ("Why?", ONE)), *[record((ASKED_TOO, ONE)), record((ASKED, OTHER))] * 2]
    assert Majority.of_records(records).answer(ASKED) == Majority.of_records(records).answer(ASKED_TOO) == ONE
    assert training_answers(records)[ASKED] == {ONE, "b"}


def test_contexts_have_an_answer_once_and_none_to_the_own_question():
    form = ContextForm(by="stage", order=[1, 2])
    earlier = [record((ASKED, ONE), stage=1), record((ASKED_TOO, OTHER), stage=1)]
    records = [*earlier, record(("Why?", "x"), stage=2), record((ASKED, ONE), stage=2)]
    asked, again = with_context(records, form, lambda _: ("key",))[2:]
    assert asked.known == (Turn(ASKED, ONE),) and again.known == ()


def assert_records_are_found(model: Path, data: str) -> None:
    Path("run.yaml").write_text(f"model: {{path: {model}}}\ndata: {{train: train.jsonl, {data}}}\noutput: out\n")
    results = json.loads(run("check", "run.yaml", "--json").stdout)["results"]
    assert {one["level"] for one in results if one["what"] == "records"} == {"ok"}, results


def test_stage_maps_and_selections_find_questions_and_values(sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 40)).save("a.png")
    write(tmp_path / "train.jsonl", {"image": "a.png", "question": ASKED_TOO, "answer": OTHER})
    (tmp_path / "stages.yaml").write_text(
        json.dumps({"questions": {ASKED: {"category": "le\u0301sion"}}}, ensure_ascii=False)
    )
    assert_records_are_found(sample / "model", "stage_map: stages.yaml, where: {category: [lésion]}")


def test_names_of_keys_and_columns_are_the_same_in_both_forms(sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(f"{number}.png")
    asked = {"question": "Why?", "answer": "x"}
    write(Path("train.jsonl"), *({"image": f"{n}.png", **asked, "le\u0301sion": f"e\u0301 {n % 2}"} for n in range(4)))
    assert_records_are_found(sample / "model", "where: {lésion: é 1}")
    rule = "{rule: keep_rows, name: one, metadata: kind, values: [é 1]}"
    Path("my.yaml").write_text(f"name: my\ncolumns: {{answer: lésion, metadata: {{kind: lésion}}}}\nrules: [{rule}]\n")
    prepared = run("data", "prepare", "my.yaml", "out", "--source", "train.jsonl", "--json")
    assert prepared.exit_code == 0 and json.loads(prepared.stdout)["rows"]["records"] == 2, prepared.output


@pytest.mark.parametrize(("named", "there", "form"), [("é", "e\u0301", "nfc"), ("e\u0301", "é", "nfd")])
def test_an_image_whose_file_has_another_form_is_named_with_what_to_do(tmp_path, named, there, form):
    Image.new("RGB", (40, 40)).save(tmp_path / f"{there}.png")
    records = write(tmp_path / "r.jsonl", {"image": f"{named}.png", "question": "Is it?", "answer": "yes"})
    [finding] = json.loads(run("data", "audit", records, "--json").stdout)["findings"]
    assert finding["code"] == "images-missing" and f"--{form} --notest" in finding["items"][0]["reason"]


def test_an_audit_compares_in_nfc(tmp_path):
    for number in range(3):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(tmp_path / f"{number}.png")
    rows = [{"image": "0.png", "question": ASKED, "answer": ONE}, {"image": "0.png", "question": ASKED_TOO}]
    rows[1] |= {"answer": "plate", "note": "e\u0301"}
    train = write(tmp_path / "train.jsonl", *rows, {"image": "1.png", "question": ASKED_TOO, "answer": OTHER})
    test = write(tmp_path / "test.jsonl", {"image": "1.png", "question": ASKED, "answer": ONE})
    found = json.loads(run("data", "audit", train, test, "--json").stdout)
    findings = {one["code"]: one for one in found["findings"]}
    assert found["num_distinct_questions"] == 1 and findings["contradictions"]["count"] == 1
    [leak] = found["leaks"]
    assert leak["num_asked_in_both"] == 1


def test_prepare_joins_duplicates_and_applies_rules_to_both_forms(tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    asked = (ASKED, ONE), (ASKED_TOO, OTHER), ("Why?", ONE), ("Why not?", "e\u0301")
    write(tmp_path / "rows.jsonl", *({"image": "a.png", "question": q, "answer": a} for q, a in asked))
    rules = "[{rule: drop_rows, name: drop, answer: [é]}, {rule: replace_labels, name: label, labels: {séssile: flat}}]"
    (tmp_path / "my.yaml").write_text(f"name: my\nrules: {rules}\n")
    result = run("data", "prepare", tmp_path / "my.yaml", tmp_path / "out", "--source", tmp_path / "rows.jsonl")
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert [one["turns"][0]["answer"] for one in written] == ["flat; größe Ω"] * 2


@pytest.mark.parametrize("text", [ONE, OTHER, "\u2126 \u212b", "日本語 が か\u3099"])
def test_the_tokenizer_of_the_sample_normalises_as_that_of_qwen(sample, real_processor, text):
    from transformers import AutoTokenizer

    for folder in (sample / "model", real_processor):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer.encode(text)) == normalize("NFC", text)
        assert tokenizer.encode(text) == tokenizer.encode(normalize("NFD", text))
