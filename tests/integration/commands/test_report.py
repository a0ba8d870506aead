"""`lookonce report`: its files and messages."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result
from support.answers import questions, wrong

from lookonce.cli import main
from lookonce.eval.scores.prediction import write_predictions
from lookonce.files import write_json
from lookonce.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def runs(make_run, tmp_path, monkeypatch):
    """Two evaluated run folders, `a` and `b`."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("ab"):
        run = make_run(output=str(tmp_path / name), train={"learning_rate": 0.1 * (number + 1)})
        write_json(run.output / "run.json", {"run": run.model_dump(mode="json"), "inputs": {}})
        write_predictions(RunFolder(run.output).predictions("val"), wrong(questions(), 20 * number))


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, ["report", *words], catch_exceptions=False)


def test_the_page_is_written_and_the_sentences_are_printed(runs, tmp_path):
    result = invoke("a", "b", "-o", "new/page.html")
    assert result.stderr == "wrote the page to new/page.html\n"
    assert result.stdout.startswith("a and b are not distinguishable: a is 33.3 points higher")
    assert "<h1>Report of a, b</h1>" in (tmp_path / "new" / "page.html").read_text()
    assert json.loads(invoke("b", "a", "--baseline", "a", "--json").stdout)["comparison"]["pairs"][0]["first"] == "a"
    assert (tmp_path / "report.html").exists()


def test_the_curves_are_written_as_pdf_if_they_are_wanted(runs, tmp_path):
    assert invoke("a", "--pdf").stderr == "wrote the page to report.html, and 0 plots as PDF beside it\n"
    lines = [json.dumps({"step": step, "loss": 1.0, "learning_rate": 0.1}) for step in (1, 2)]
    RunFolder(tmp_path / "a").log.write_text("\n".join(lines) + "\n")
    assert invoke("a", "--pdf").stderr == "wrote the page to report.html, and 2 plots as PDF beside it\n"
    assert {path.name for path in tmp_path.glob("*.pdf")} == {"report-loss.pdf", "report-learning-rate.pdf"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "is not a run folder"),
        (["a", "--split", "test"], "no predictions of the split test; there are those of val"),
    ],
)
def test_mistakes_are_explained_and_no_page_is_written(runs, tmp_path, words, message):
    assert message in invoke(*words).output and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("output", ["a/predictions/val.jsonl", "a/run.json", "a"])
def test_inputs_and_files_that_are_no_pages_are_not_replaced(runs, tmp_path, output):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = invoke("a/predictions/val.jsonl", "-o", output)
    assert f"{output} exists and is not a page of lookonce report; name another file" in result.output
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [invoke("a", "-o", "new.html").exit_code for _ in range(2)] == [0, 0]  # a page is written again
