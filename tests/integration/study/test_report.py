"""The report of a study: variants beside the baseline, what sequences forget, costs, a routed one, paper files."""

from __future__ import annotations

import csv
import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.answers import questions
from support.html_page import as_text, numbers_in, numbers_of

from lookonce.datasets.balance import Majority
from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import Prediction, read_predictions, write_predictions
from lookonce.files import write_json
from lookonce.run.config import read_run_file
from lookonce.run.records import read_splits
from lookonce.study.figures import Table
from lookonce.study.file import expand, read_study
from lookonce.study.report import StudyReport, report_study
from lookonce.study.state import StudyStatus

pytestmark = pytest.mark.usefixtures("no_fsync")

STAGES = ("1", "2", "3")
VARIANTS = {
    "plain": None,
    "one": {"data.where": {"stage": 1}},
    "two": {"starts_from": "one", "data.where": {"stage": 2}},
    "three": {"starts_from": "two", "data.where": {"stage": 3}},
    "routed": {"route": {"by": "stage", "variants": {1: "one", 2: "two", 3: "three"}}},
}


def answered(shares: tuple[int, int, int]) -> list[Prediction]:
    """Answers to 20 questions of each stage, this many of which are right."""
    rows = [replace(row, stage=STAGES[place % 3]) for place, row in enumerate(questions())]
    return [
        row if place // 3 < shares[place % 3] else replace(row, predicted="perhaps") for place, row in enumerate(rows)
    ]


RIGHT = {"plain": (15, 15, 15), "one": (20, 2, 3), "two": (12, 18, 4), "three": (8, 10, 19)}


@pytest.fixture(scope="module")
def study_in(write_study_in, look_complete):
    """A study in a folder, in which all runs of these variants are complete."""

    def make(folder: Path, variants: dict[str, object] = VARIANTS, compare: str | None = "plain") -> Path:
        path = write_study_in(folder, variants, seeds=[1, 2], compare={"baseline": compare})
        for one in expand(read_study(path)).values():
            first, *others = RIGHT[one.variant]
            look_complete(one, answered((first - one.seed, *others)))
        return path

    return make


@pytest.fixture
def study(study_in, tmp_path):
    return functools.partial(study_in, tmp_path)


@pytest.fixture(scope="module")
def report(study_in, tmp_path_factory) -> StudyReport:
    """The report of all variants; tests must not change it."""
    return report_study(study_in(tmp_path_factory.mktemp("study")))


def test_the_matrix_has_the_exact_match_of_each_stage_after_each_phase_and_scores_are_means_over_seeds(report):
    (matrix,) = report.to_json()["forgetting"]
    assert (matrix["variants"], matrix["stages"], matrix["seeds"]) == (["one", "two", "three"], list(STAGES), [1, 2])
    expected = [[0.925, 0.1, 0.15], [0.525, 0.9, 0.2], [0.325, 0.5, 0.95]]
    assert [[round(share, 4) for share in line] for line in matrix["exact_match"]] == expected
    assert [round(points, 4) for points in matrix["forgetting"]] == [0.6, 0.4, -0.75]
    scores = report.to_json()["scores_by"]
    assert list(scores["stage"]) == list(STAGES) and len(scores["question"]) == 5
    shares = dict(zip(VARIANTS, map(pytest.approx, (0.675, 0.925, 0.525, 0.325, 0.925)), strict=True))
    assert scores["stage"]["1"] == {"num_questions": 20, "majority": 0} | shares


def test_a_routed_variant_has_the_answers_of_each_adapter_alone(report):
    rows = read_predictions(report.folder / "routed-2" / "predictions" / "val.jsonl")
    alone = {
        stage: read_predictions(report.folder / f"{variant}-2" / "predictions" / "val.jsonl")
        for stage, variant in zip(STAGES, ("one", "two", "three"), strict=True)
    }
    assert len(rows) == 60 and all(row == alone[row.stage or ""][place] for place, row in enumerate(rows))
    by_variant = {one["variant"]: one for one in report.to_json()["variants"]}
    assert by_variant["routed"]["exact_match"] == pytest.approx((18.5 + 18 + 19) / 60)


def test_the_cost_of_a_variant_is_that_of_all_that_it_needs(report):
    costs = {one["variant"]: one["cost"] for one in report.to_json()["variants"]}
    assert {variant: cost["needs"] for variant, cost in costs.items()} == {
        "plain": ["plain"],
        "one": ["one"],
        "two": ["one", "two"],
        "three": ["one", "two", "three"],
        "routed": ["one", "two", "three"],
    }
    assert [round(cost["training_seconds"], 1) for cost in costs.values()] == [3.2, 3.2, 6.4, 9.6, 9.6]
    assert [cost["num_records"] for cost in costs.values()] == [32, 32, 64, 96, 96]
    assert [cost["answering_seconds"] for cost in costs.values()] == [1.5, 1.5, 1.5, 1.5, 4.5]


@pytest.mark.guarantee("Every number on the page of a study is in the JSON of the study's report.")
def test_the_json_has_every_number_of_the_page(report):
    known = numbers_in(json.loads(json.dumps(report.to_json(), default=str)))
    page = report.to_page()
    assert f"<h1>{report.folder.name}: plain against 4 variants</h1>" in page
    assert numbers_of(page) - known == set()
    words = as_text(page)
    assert all(title in words for title in ("Variants against plain", "Forgetting: one -&gt; two".replace("&gt;", ">")))
    assert report.to_json()["methods"] in words


def test_the_page_opens_with_the_forest_plot_of_all_variants_and_a_list_of_verdicts(report):
    page = report.to_page()
    first = page.partition("<h2>")[2]
    assert first.startswith("Variants against plain</h2>") and first.index("<svg") < first.index("<table")
    plot = first.partition("<svg")[2].partition("</svg>")[0]
    assert all(f">{variant}</text>" in plot for variant in VARIANTS) and "majority baseline" in plot
    verdicts = [pair["sentence"] for pair in report.to_json()["pairs"]]
    assert all(f"<li>{sentence}</li>" in first.partition("<table")[0] for sentence in verdicts)
    assert re.search("<h([23])>[^<]*</h[23]>\\s*(<h2>|<h\\1>|<footer)", page) is None, "a heading without content"


def test_the_answers_are_those_of_the_first_seed_of_each_variant(report):
    won, *_ = [kind for kind in report.to_json()["answers"] if kind["kind"].startswith("Won")]
    assert won["kind"] == "Won by one-1: right there, wrong in plain-1"
    rows = read_predictions(report.folder / "plain-1" / "predictions" / "val.jsonl")
    told = {row.origin: row.predicted for row in rows}
    shown = [row for kind in report.to_json()["answers"] for row in kind["shown"]]
    assert len(shown) == 48 and all(row["predicted"]["plain-1"] == told[row["origin"]] for row in shown)
    assert set(shown[0]["predicted"]) == {f"{variant}-1" for variant in VARIANTS}


def test_tables_and_methods_are_written_beside_the_page_with_the_figures_of_the_json(report, tmp_path):
    written = {path.name: path for path in report.write(tmp_path / "page.html", has_pdf=True)}
    tables = ("variants", "questions", "stages", "forgetting-three")
    names = ["page-methods.tex", *(f"page-{name}.{kind}" for name in tables for kind in ("csv", "tex"))]
    assert list(written) == [*names, "page-forest.pdf"] and (tmp_path / "page.html").exists()
    assert written["page-forest.pdf"].read_bytes().startswith(b"%PDF")
    with written["page-variants.csv"].open() as file:
        rows = list(csv.DictReader(file))
    for row, figures in zip(rows, report.to_json()["variants"], strict=True):
        assert (row["variant"], float(row["exact_match"])) == (figures["variant"], figures["exact_match"])
        assert (float(row["interval_low"]), float(row["interval_high"])) == figures["interval"]
        assert float(row["cost.training_seconds"]) == figures["cost"]["training_seconds"]
        assert row["p_holm"] == ("" if figures["p_holm"] is None else str(figures["p_holm"]))
    latex = written["page-forgetting-three.tex"].read_text()
    assert r"one & 92.5\% & 10.0\% & 15.0\% \\" in latex and r"forgetting & +60.0 & +40.0 & -75.0 \\" in latex
    header = written["page-variants.tex"].read_text().partition("\\toprule\n")[2].partition(r" \\")[0].split(" & ")
    assert len(set(header)) == len(header) == 11 and {"majority", "points above plain"} <= set(header)


def test_the_methods_name_model_variants_seeds_and_tests(report):
    methods = report.methods
    assert "variants (plain, one, two, three, routed), each with the seeds 1, 2, on cached features" in methods
    assert "on the 60 questions about 12 images of the val split. The measure is exact match" in methods
    assert (
        "; that of a variant is the mean over its seeds. Always" in methods and "Holm's correction for 4 c" in methods
    )


@pytest.mark.guarantee("No text of a record or of an answer becomes markup.")
def test_texts_stay_texts_in_latex_and_csv(tmp_path):
    hostile = '=a_b & 50% \\cmd{x} ~^ #1 $ <b> "q", c\n\ud800'
    table = Table("t", "A_b", "5 %", ("x", "%"), [(hostile, "1")], [{"x": hostile[:-1], "my-interval": 0.1}])
    path, tex = table.write(tmp_path / "p.html")
    latex = tex.read_text()
    assert r"=a\_b \& 50\% \textbackslash{}cmd\{x\} \textasciitilde{}\textasciicircum{} \#1 \$ \textless{}b" in latex
    assert "\\begin{tabular}{lr}\n\\toprule\nx & \\% \\\\\n\\midrule\n" in latex and latex.endswith("\\end{table}\n")
    assert "\\caption{A\\_b. 5 \\%}\n\\label{tab:t}\n" in latex and len(latex.splitlines()) == 14
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["x", "my-interval"], [f"'{hostile[:-1]}", "0.1"]]


def test_the_majority_is_that_of_the_base_run_for_every_variant(study):
    """The answers are to "is there text" alone, of which the base run's training records have a majority."""
    path = study({name: VARIANTS[name] for name in ("plain", "one")})
    base = read_run_file(read_study(path).base)
    answer = Majority.of_records(read_splits(base)["train"]).answer("is there text")
    for number, one in enumerate(expand(read_study(path)).values()):
        rows = [
            replace(row, question="is there text", majority=f"own {number}") for row in answered(RIGHT[one.variant])
        ]
        own = [replace(row, answer=answer, predicted=answer) if place < 30 else row for place, row in enumerate(rows)]
        write_predictions(one.folder.predictions("val"), own)
        write_json(one.folder.metrics("val"), Evaluation.of(own).to_json())
    report = report_study(path)
    found = report.to_json()
    assert {one["majority"] for one in found["candidates"]} == {0.5} == {one["majority"] for one in found["variants"]}
    assert {run["baselines"]["majority"]["exact_match"] for run in found["verdict"]["runs"]} == {0.5}
    assert "those of all training records of the base run" in found["majority"]
    assert found["majority"] in " ".join(report.text().split()) and found["majority"] in as_text(report.to_page())


def test_without_the_records_each_variant_keeps_its_own_majority_and_this_is_said(study, tmp_path):
    path = study({name: VARIANTS[name] for name in ("plain", "one", "two")}, None)
    base = read_run_file(read_study(path).base)
    gone = base.model_copy(update={"data": base.data.model_copy(update={"train": [tmp_path / "gone.jsonl"]})})
    read_study(path).base.write_text(gone.to_yaml())
    found = report_study(path).to_json()
    assert {one["majority"] for one in found["candidates"]} == {0.5}
    assert (
        "each run's own training records, because those of the base run cannot be read: no records" in found["majority"]
    )
    assert len(found["pairs"]) == 3, "without a baseline all variants are compared, and the figures are of the first"
    assert [one["difference"] is None for one in found["variants"]] == [True, False, False]


def test_a_variant_with_context_has_a_table_of_predicted_reference_and_no_answers(study):
    variants = {"plain": None, "one": {"data.context": {"by": "stage", "order": [1, 2, 3]}}}
    path = study(variants)
    for seed in (1, 2):
        folder = expand(read_study(path))[f"one-{seed}"].folder
        write_predictions(folder.predictions("val-reference"), answered((20, 20, 20)))
    report = report_study(path)
    [one] = report.to_json()["contexts"]
    assert (one["name"], list(one["num_questions"])) == ("one", ["all", "stage 1", "stage 2", "stage 3"])
    assert one["exact_match"]["reference"]["stage 3"]["value"] == 1 and "none" not in one["exact_match"]
    assert one["exact_match"]["predicted"]["all"]["value"] == pytest.approx(
        report.to_json()["variants"][1]["exact_match"]
    )
    assert [line.endswith(" --split val --no-context") for line in one["not_asked"]] == [True, True]
    *_, table, latex = report.write(report.folder / "page.html")
    assert (table.name, latex.name) == ("page-contexts-one.csv", "page-contexts-one.tex")
    with table.open() as file:
        row = list(csv.DictReader(file))[1]
    name = "reference - predicted"
    ends = [float(row[f"{name}.{end}"]) for end in ("value", "interval_low", "interval_high")]
    assert ends == [(found := one["differences"][name]["stage 1"])["value"], *found["interval"]]
    assert r"stage 2 & 10.0\% [" in latex.read_text() and " & not evaluated & " in latex.read_text()
    lines = (
        report.text()
        .partition("one (2 seeds) with predicted, reference and no earlier answers in the prompts\n")[2]
        .splitlines()
    )
    assert (
        lines[3].split()[:6] == ["stage", "2", "10.0%", "100.0%", "not", "evaluated"] and max(map(len, lines[:5])) <= 80
    )
    page = report.to_page()
    assert numbers_of(page) - numbers_in(json.loads(json.dumps(report.to_json(), default=str))) == set()
    assert as_text(page).index("Earlier answers in the prompts") < as_text(page).index("Comparison")


def test_the_cost_of_a_variant_whose_first_phase_has_no_answers_is_not_known(study):
    path = study()
    for seed in (1, 2):
        folder = expand(read_study(path))[f"one-{seed}"].folder
        folder.metrics("val").unlink()
    trained = expand(read_study(path))["plain-1"].folder.trained
    write_json(trained, json.loads(trained.read_text()) | {"first_step": 2})
    costs = {one["variant"]: one["cost"] for one in report_study(path).to_json()["variants"]}
    assert list(costs) == ["plain", "two", "three"]
    assert (costs["plain"]["num_records"], costs["two"]["num_records"]) == (32, None)
    assert costs["plain"]["training_seconds"] is None, "of a resumed training it is not known"


def test_runs_that_are_not_complete_are_left_out_with_all_that_needs_them(study):
    path = study()
    (expand(read_study(path))["three-2"].folder.folder / "summary.json").unlink()
    found = report_study(path)
    assert found.left_out == ["three-2", "routed-2"] and found.to_json()["forgetting"][0]["seeds"] == [1]
    routed = StudyStatus.read(path).to_json()["routed"]
    assert [one["score"] and one["score"]["metric"] for one in routed] == ["exact_match", None]
