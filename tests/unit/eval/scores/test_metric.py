"""The metric that counts: the number of each question, functions of the user's own, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from lookonce.errors import UsageError
from lookonce.eval.compare import compare
from lookonce.eval.join import Run
from lookonce.eval.scores import match
from lookonce.eval.scores.metric import METRICS, Scorer, own_function, working_scorer
from lookonce.eval.scores.metrics import Evaluation, headline
from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.statistics import share_interval, totals

IMAGES, ASKED = 40, 10
WORDS = [f"w{number}" for number in range(30)]


def sentences(share: float, seed: int = 0) -> list[Prediction]:
    """Questions about images, of whose references answers have about this share of words, more for some images."""
    rng, own = np.random.default_rng(0), np.random.default_rng(seed)
    ease = np.clip(share + 0.3 * rng.standard_normal(IMAGES), 0, 1)
    rows = []
    for number in range(IMAGES * ASKED):
        words = rng.choice(WORDS, rng.integers(4, 9))
        text = [word if own.random() < ease[number // ASKED] else "x" for word in words][: own.choice([3, 9, 9])]
        key = str(number // ASKED)
        answer, predicted = " ".join(words), " ".join(text)
        rows.append(
            Prediction(
                f"a:{number}", (), f"q{number}", answer, predicted, "w1 w2 w3 w4", image_keys=(key,), turn=number
            )
        )
    return rows


@pytest.mark.guarantee("The mean of what questions score by a metric is the metric's figure over all of them.")
@pytest.mark.parametrize("metric", METRICS)
def test_the_mean_of_the_questions_is_the_figure_of_the_evaluation(metric):
    rows = sentences(0.7)
    rows += [replace(row, answer="a; b", predicted="b; c") for row in rows[:5]]
    rows += [
        replace(row, answer="[1, 2, 3, 4]", predicted=text)
        for row, text in zip(rows, ("(2, 3)", "(9, 9)"), strict=False)
    ]
    evaluation = Evaluation.of(rows, metric=metric)
    found, figures = evaluation.headline, evaluation.figures
    expected = (evaluation.overall.exact_match, evaluation.overall.majority)
    if metric != "exact_match":
        assert (
            found.num_questions == figures[metric].num_questions and found.name.split(" (")[0] in figures[metric].name
        )
        expected = (figures[metric].model, figures[metric].majority)
    assert (found.score, found.majority) == pytest.approx(expected, abs=1e-12)
    assert evaluation.baselines["majority"].score == found.majority
    assert evaluation.exact.score == evaluation.overall.exact_match


@pytest.mark.guarantee("The interval of BLEU and chrF has the spread that drawing images again gives.")
@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_the_spread_between_images_is_that_of_drawing_images_again(metric):
    """Of one system, and of the difference of two, against 150 bootstrap resamples (standard error 6 %)."""
    first, second = sentences(0.6, 1), sentences(0.7, 2)
    texts = [[row.predicted for row in rows] for rows in (first, second)]
    numbers = np.array([Scorer(first, metric)(answers) for answers in texts])
    rng, drawn = np.random.default_rng(0), []
    for _ in range(150):
        chosen = [ASKED * image + number for image in rng.integers(0, IMAGES, IMAGES) for number in range(ASKED)]
        metrics = match.TextMetrics([(first[number].answer,) for number in chosen])
        scored = getattr(metrics, f"_{metric}")
        drawn.append([scored.corpus_score([of[number] for number in chosen], None).score / 100 for of in texts])
    clusters = np.arange(IMAGES * ASKED) // ASKED
    for values, resampled in ((numbers[0], np.array(drawn)[:, 0]), (numbers[1] - numbers[0], np.diff(drawn)[:, 0])):
        sums = totals((values - values.mean())[:, None], clusters)
        assert np.sqrt((sums**2).sum()) / len(values) == pytest.approx(resampled.std(), rel=0.2)
    wrong = np.tile(numbers[0].mean(), len(clusters))  # what sentence scores without a spread would be
    assert np.diff(share_interval(wrong, clusters)) < 0.5 * np.diff(share_interval(numbers[0], clusters))


def test_a_metric_counts_the_questions_to_which_it_applies_and_each_baseline_on_the_same():
    rows = [replace(row, answer="yes", predicted="yes") for row in sentences(1)[:30]]
    boxed = [replace(row, answer="[0, 0, 9, 9]", predicted="(5, 5)", majority="(20, 20)") for row in rows[10:]]
    head, baselines = headline([*rows[:10], *boxed], {"untuned": ["no"] * 30}, "point_inside")
    assert (head.num_questions, head.score, head.majority) == (20, 1.0, 0.0)
    assert (baselines["untuned"].score, baselines["untuned"].difference) == (0.0, 1.0)
    assert Evaluation.of(rows, metric="point_inside").headline.num_questions == 0
    with pytest.raises(UsageError, match="points inside the box applies to none of the questions; .* --metric"):
        compare([Run(name, rows, "", None) for name in "ab"], metric="point_inside")


OWN = """
def length(question, answer, reference, record):
    assert record["origin"].startswith("a:") and record["image_keys"] and "predicted" not in record
    return len(answer) / max(len(answer), len(reference))

def broken(question, answer, reference, record):
    return 1 / 0 if record["origin"] == "a:7" else {"a:8": 1.5, "a:9": float("nan")}.get(record["origin"], 1)

def exits(question, answer, reference, record):
    raise SystemExit(0)

def prints(question, answer, reference, record):
    import os
    print("graded")
    os.system("echo by a process")
    record.clear()
    return 1

def other(answer, reference):
    return 1

value = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text(OWN)
    (tmp_path / "my_script.py").write_text("import sys\nprint('usage')\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_scores", None)
    own_function.cache_clear()


def test_a_function_of_ones_own_scores_each_answer_by_its_best_reference(own):
    rows = [replace(row, predicted="abc", answer="abcdef", references=("abcdef", "abcd")) for row in sentences(1)]
    assert headline(rows, {}, "my_scores:length")[0].score == pytest.approx(0.75)
    found = compare([Run(name, rows, "", None, "my_scores:length") for name in "ab"])
    assert found.metric == "my_scores:length" and found.candidates[0].score == pytest.approx(0.75)


def test_a_function_that_prints_leaves_stdout_alone_and_one_that_exits_is_an_error(own, capfd):
    """Stdout may be JSON, and exit code 0 would be that of a finished command."""
    row = replace(sentences(1)[0], references=("a", "b"))
    assert Scorer([row], "my_scores:prints")(["a"]).tolist() == [1]
    with pytest.raises(UsageError, match="my_scores:exits failed on a:0 .*SystemExit"):
        Scorer([row], "my_scores:exits")(["a"])
    with pytest.raises(UsageError, match="my_script:grade cannot be imported"):
        Scorer([row], "my_script:grade")
    printed = capfd.readouterr()
    assert printed.out == "" and all(text in printed.err for text in ("graded", "by a process", "usage"))


def test_a_metric_is_tried_before_there_are_answers(own):
    rows = sentences(1)
    for metric in ("exact_match", "my_scores:length"):
        assert working_scorer(rows, metric).rows
    for metric, said in {"my_scores:exits": "failed on a:0", "point_inside": "applies to none of the 9"}.items():
        with pytest.raises(UsageError, match=said):
            working_scorer(rows, metric, "the 9")


@pytest.mark.guarantee("An error in a user's metric names the record, and so does a score that is not from 0 to 1.")
@pytest.mark.parametrize(("origin", "said"), [("a:7", "ZeroDivisionError"), ("a:8", "gave 1.5"), ("a:9", "gave nan")])
def test_an_error_of_the_users_function_names_the_record(own, origin, said):
    row = next(row for row in sentences(1) if row.origin == origin)
    with pytest.raises(UsageError, match=f"my_scores:broken .*{said}") as refused:
        headline([row], {}, "my_scores:broken")
    assert origin in str(refused.value) and row.question in str(refused.value)


@pytest.mark.guarantee("A run file cannot name a function of Python itself, or one of another form, as its metric.")
@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("os:system", "is part of Python"),
        ("subprocess:run", "is part of Python"),
        ("pip.__main__:main", "is part of Python, or a program"),
        ("my_scores:other", "has another form"),
        ("my_scores:value", "has another form"),
        ("my_scores:nothing", "cannot be imported"),
        ("no_such_module:f", "cannot be imported .*No module named"),
    ],
)
def test_what_is_not_a_metric_is_refused_with_the_form_that_is(own, metric, said):
    with pytest.raises(UsageError, match=rf"{metric} {said}.*def NAME\(question, answer, reference, record\)"):
        Scorer(sentences(1)[:1], metric)


def test_a_text_metric_without_its_libraries_says_what_to_install(monkeypatch):
    monkeypatch.setattr(match, "has_text_metrics", lambda: False)
    with pytest.raises(
        UsageError, match=r"bleu needs libraries that are not installed: pip install 'lookonce\[metrics"
    ):
        Scorer(sentences(1)[:1], "bleu")


def test_runs_with_different_metrics_are_compared_by_the_one_that_is_named():
    runs = [Run(name, sentences(0.6, 1), "", None, metric) for name, metric in (("a", "bleu"), ("b", "token_f1"))]
    with pytest.raises(UsageError, match=r"different metrics \(a: bleu, b: token_f1\); choose one with --metric"):
        compare(runs)
    assert compare(runs, metric="rougeL").candidates[0].score > 0.3
    better = [
        Run(name, sentences(share, seed), "", None, "bleu") for name, share, seed in (("a", 0.4, 1), ("b", 0.8, 2))
    ]
    [pair] = compare(better).pairs
    assert pair.better == "b" and pair.interval.low > 0 and pair.p < 0.001
