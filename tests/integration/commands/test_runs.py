"""`lookonce compare`, `export` and `report` on the files of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.answers import questions, wrong
from support.rows import run as invoke
from support.rows import write_lines

from lookonce.eval.scores.prediction import Prediction, write_predictions
from lookonce.files import write_json
from lookonce.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("no_fsync")


def row(number: int, image: str) -> Prediction:
    question = f"q{number % 3}"
    return Prediction(f"val.jsonl:{number}", (f"{image}.jpg",), question, "yes", "yes", "no", image_keys=(image,))


ROWS = [row(number, str(number // 3)) for number in range(60)]


@pytest.fixture
def write_runs(make_run, tmp_path, monkeypatch):
    """Writes run folders with these answers to the questions of `val`."""
    monkeypatch.chdir(tmp_path)

    def write(**answers: list[Prediction]) -> None:
        for number, (name, rows) in enumerate(answers.items()):
            run = make_run(output=str(tmp_path / name), train={"learning_rate": 0.1 * (number + 1)})
            write_json(run.output / "run.json", {"run": run.model_dump(mode="json"), "inputs": {}})
            write_predictions(RunFolder(run.output).predictions("val"), rows)

    return write


@pytest.fixture
def runs(write_runs) -> None:
    """Three run folders: `a` answers all right, `b` most, `c` half of the questions."""
    write_runs(a=ROWS, b=wrong(ROWS, 2), c=wrong(ROWS, 30))


def test_compare_prints_a_sentence_for_each_pair(runs):
    text = " ".join(invoke("compare", "a", "b", "c").output.split())
    assert "60 questions about 20 images" in text
    assert "a and b are not distinguishable" in text and "a answers 50.0 points more questions exactly right" in text
    assert "b answers 46.7 points more" in text and "three values of train.seed" in text


def test_compare_with_a_baseline_has_a_pair_for_each_other_run(runs):
    for words in (("a", "b", "c", "--baseline", "c"), ("a", "b", "--baseline", "c")):
        value = json.loads(invoke("compare", *words, "--json").output)
        found = [(pair["first"], pair["second"], pair["better"]) for pair in value["pairs"]]
        assert found == [("c", "a", "a"), ("c", "b", "b")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "a"], "comparing needs two runs; name them: lookonce compare RUN RUN"),
        (["compare", "a", "nothing"], "is not a run folder"),
        (["report", "nothing"], "is not a run folder"),
        (["report", "a", "--split", "test"], "no predictions of the split test; there are those of val"),
        (["compare", "a", "b", "--split", "test"], "no predictions of the split test; there are those of val"),
        (["export", "a", "--to", "medico", "--info", "team.yaml"], "Team: unknown key; did you mean `Team_Name`?"),
    ],
)
def test_mistakes_are_explained_and_no_page_is_written(runs, tmp_path, words, message):
    (tmp_path / "team.yaml").write_text("Team: x\n")
    result = invoke(*words)
    assert result.exit_code in (1, 2) and message in result.output and not (tmp_path / "report.html").exists()


def test_export_fails_if_rows_of_the_challenge_are_missing(runs, tmp_path):
    pytest.importorskip("sacrebleu")
    for words in (("a", "--to", "medvqa-gi"), ("b", "--to", "medico")):
        result = invoke("export", *words, "-o", "new.json")
        assert result.exit_code == 2 and "69 of 69 questions of the split are not answered: " in result.stderr
        assert "export what there is with --partial" in result.stderr and not Path("new.json").exists()
    records = [{"images": list(one.images), "turns": [{"question": one.question, "answer": "yes"}]} for one in ROWS]
    data = {"train": ["x.jsonl"], "val": [str(write_lines(tmp_path / "val.jsonl", *records))]}
    value = json.loads(Path("a/run.json").read_text())
    write_json(Path("a/run.json"), value | {"run": value["run"] | {"data": data}})
    assert "wrote 60 answers" in invoke("export", "a", "--to", "medvqa-gi", "-o", "whole.json").output
    medico = invoke("export", "a", "--to", "medico", "-o", "medico.json")
    assert medico.exit_code == 2 and "medico scores 1,500 public rows, and this split has 60" in medico.stderr
    assert "questions; name the split that has these rows with --split, or export what" in medico.stderr
    medico = invoke("export", "a", "--to", "medico", "-o", "medico.json", "--partial")
    assert medico.exit_code == 0 and medico.stderr.count("scores 1,500 public rows") == 1
    lines = RunFolder(Path("a")).predictions("val").read_text().splitlines(keepends=True)
    RunFolder(Path("a")).predictions("val").write_text("".join(lines[1:]))
    said = invoke("export", "a", "--to", "medvqa-gi", "-o", "less.json").stderr
    assert f'1 of 60 questions of the split are not answered: "q0" ({tmp_path}/val.jsonl:1); answer all with' in said


def test_export_writes_once_and_names_what_is_missing(runs, tmp_path):
    pytest.importorskip("sacrebleu")
    (tmp_path / "team.yaml").write_text("Team_Name: t\nContact_emails: [a@b.example]\n")
    words = ("export", "a", "--to", "medvqa-gi", "--info", "team.yaml", "-o", "gi.json", "--partial")
    result = invoke(*words)
    assert "submission_info lacks Participant_Names, Affiliations, Country" in result.output
    assert "wrote 60 answers to gi.json" in result.output
    value = json.loads((tmp_path / "gi.json").read_text())
    assert value["submission_info"]["Team_Name"] == "t" and value["public_scores"]["bleu"] == 0.0
    assert "gi.json exists; name another file with -o" in invoke(*words).output


@pytest.fixture
def two_runs(write_runs) -> None:
    """Two evaluated run folders, `a` and `b`."""
    write_runs(a=questions(), b=wrong(questions(), 20))


def test_the_page_is_written_and_the_sentences_are_printed(two_runs, tmp_path):
    result = invoke("report", "a", "b", "-o", "new/page.html")
    assert result.stderr == "wrote the page to new/page.html\n"
    assert result.stdout.startswith("a and b are not distinguishable: a is 33.3 points higher")
    assert "<h1>Report of a, b</h1>" in (tmp_path / "new" / "page.html").read_text()
    report = json.loads(invoke("report", "b", "a", "--baseline", "a", "--json").stdout)
    assert report["comparison"]["pairs"][0]["first"] == "a"
    assert (tmp_path / "report.html").exists()


def test_the_curves_are_written_as_pdf_if_they_are_wanted(two_runs, tmp_path):
    assert invoke("report", "a", "--pdf").stderr == "wrote the page to report.html, and 0 plots as PDF beside it\n"
    lines = [json.dumps({"step": step, "loss": 1.0, "learning_rate": 0.1}) for step in (1, 2)]
    RunFolder(tmp_path / "a").log.write_text("\n".join(lines) + "\n")
    mine = tmp_path / "report-loss.pdf"
    mine.write_text("%PDF of another program")
    assert f"{mine.name} exists and is not a plot" in invoke("report", "a", "--pdf").stderr
    assert [*tmp_path.glob("*.pdf")] == [mine] and mine.read_text() == "%PDF of another program"
    mine.unlink()
    for _ in range(2):
        assert invoke("report", "a", "--pdf").stderr == "wrote the page to report.html, and 2 plots as PDF beside it\n"
    assert {path.name for path in tmp_path.glob("*.pdf")} == {"report-loss.pdf", "report-learning-rate.pdf"}


@pytest.mark.parametrize("output", ["a/predictions/val.jsonl", "a/run.json", "a"])
def test_inputs_and_files_that_are_no_pages_are_not_replaced(two_runs, tmp_path, output):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = invoke("report", "a/predictions/val.jsonl", "-o", output)
    assert f"{output} exists and is not a page of lookonce report; name another file" in result.output
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [invoke("report", "a", "-o", "new.html").exit_code for _ in range(2)] == [0, 0]  # a page is written again
