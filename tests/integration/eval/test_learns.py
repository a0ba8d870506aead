"""The sample run: it learns, it uses the images, stock libraries get the same answers, pages show its scores."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from support.sample import stock_answer
from transformers import Qwen3VLForConditionalGeneration

from lookonce.cache.store.reader import VisionCache
from lookonce.cli import main
from lookonce.datasets.records import read_records
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.metrics import Baseline
from lookonce.eval.scores.prediction import Score
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.log_file import read_lines
from lookonce.summary import Summary

SPLITS = ("val", "test")
NUM_ASKED = 40
"""Number of questions that the stock model is asked; it runs its tower for each."""


@pytest.fixture(scope="module")
def trained(root: Path, sample: Path, built: VisionCache, tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """The run of `experiments/sample.yaml`, trained as in the README, in a folder with the folders that it names."""
    folder = working_folder(tmp_path_factory.mktemp("trained"), root, sample, built)
    with contextlib.chdir(folder):
        command("lookonce train experiments/sample.yaml")
    return RunFolder(folder / "runs" / "sample").read_run()


@pytest.fixture(scope="module")
def started(root: Path, sample: Path, built: VisionCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapter from which `docs/grpo.md` learns from rewards."""
    folder = working_folder(tmp_path_factory.mktemp("started"), root, sample, built)
    with contextlib.chdir(folder):
        command("lookonce train experiments/sample.yaml --set train.epochs=6 --set output=runs/start")
    return folder


def working_folder(folder: Path, root: Path, sample: Path, built: VisionCache) -> Path:
    """Put the folders into it that the sample's run files name."""
    (folder / "data").mkdir()
    for name, there in {
        "data/sample": sample,
        "caches": built.folder.parent,
        "experiments": root / "experiments",
    }.items():
        (folder / name).symlink_to(there)
    return folder


def command(line: str) -> str:
    """What a command prints on stdout."""
    done = CliRunner().invoke(main, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    return done.stdout


OF_SAMPLE = re.compile(
    r"lookonce (?:train experiments/sample|eval runs/(?:sample|short|longer)|compare runs/sample|"
    r"adapter merge runs/sample|study plan experiments/sample-study).*"
)
"""Commands of pages that are about the sample's run."""
OF_STUDIES = re.compile(r"lookonce study (?:status|report) experiments/(?:sample|staged)-study\.yaml")
FIGURE = re.compile(r"%|\d to -?\d|\d of \d")
PAGES = ("metrics", "evaluation", "compare", "merge", "studies")
STUDIES = os.environ.get("LOOKONCE_STUDIES")
"""A folder in which both studies of experiments/ are complete, which takes twenty minutes on two cores."""


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in PAGES)])
def test_pages_show_the_figures_that_their_commands_print(page, root, trained, monkeypatch):
    """The lines of a page that have scores are those that the commands before them print.

    First of all, since an evaluation also shows the baselines that a later test asks for.
    """
    monkeypatch.chdir(trained.output.parents[1])
    measured, text = Summary.read(RunFolder(trained.output)).exact_match, (root / page).read_text()
    if f"validation  {measured:.1%}" not in (root / "README.md").read_text():
        pytest.skip("this processor adds in another order, and its training ends with other answers")
    check_figures(text, OF_SAMPLE)


@pytest.mark.skipif(STUDIES is None, reason="LOOKONCE_STUDIES does not name a folder with both studies of experiments/")
@pytest.mark.parametrize("page", ["docs/studies.md", "docs/stages.md"])
def test_pages_show_the_figures_of_the_studies(page, root, monkeypatch):
    monkeypatch.chdir(str(STUDIES))
    check_figures((root / page).read_text(), OF_STUDIES)


OF_REWARDS = re.compile(
    r"lookonce (?:train experiments/.*objective=grpo|eval runs/(?:start|rewarded)|compare runs/start).*"
)


def test_the_page_on_rewards_shows_the_figures_that_its_commands_print(root, started, monkeypatch):
    monkeypatch.chdir(started)
    text = (root / "docs/grpo.md").read_text().replace("\\\n", "")
    measured = Summary.read(RunFolder(started / "runs" / "start")).exact_match
    if f"{measured * 100:.0f} % exact match on validation" not in text:
        pytest.skip("this processor adds in another order, and its training ends with other answers")
    check_figures(text, OF_REWARDS)


def test_a_reward_for_one_answer_makes_it_the_answer_to_all_questions(started, tmp_path, monkeypatch):
    """Whatever is asked: from a twentieth of the answers to nearly all in a few steps."""
    monkeypatch.chdir(started)
    monkeypatch.syspath_prepend(tmp_path)
    source = "def says_yes(question, answer, reference, record):\n    return float(answer == 'yes')\n"
    (tmp_path / "rewards_of_yes.py").write_text(source)
    command(
        f"lookonce train experiments/sample.yaml --set train.objective=grpo --set train.start_from=runs/start"
        f" --set train.steps=30 --set train.learning_rate=1.0e-3 --set train.warmup=0 --set train.logging_steps=3"
        f" --set batch.questions_per_image=1 --set grpo.reward=rewards_of_yes:says_yes --set grpo.filter=false"
        f" --set grpo.max_new_tokens=16 --set eval.split=null --set output={tmp_path / 'yes'}"
    )
    rewards = [line["reward"] for line in read_lines(tmp_path / "yes" / "log.jsonl") if "reward" in line]
    assert max(rewards[:2]) < 0.2 and min(rewards[-2:]) > 0.9


def check_figures(text: str, commands: re.Pattern[str]) -> None:
    """Check that each line of a page with figures is one that the commands before it print."""
    printed: set[str] = set()
    num_checked = 0
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if language:
            lines = [line for one in commands.findall(block) for line in command(one).splitlines()]
            printed = {" ".join(line.split()) for line in lines}
        elif printed:
            shown = [" ".join(line.split()) for line in block.splitlines() if FIGURE.search(line)]
            assert [line for line in shown if line not in printed and not any(is_alike(line, o) for o in printed)] == []
            num_checked += len(shown)
    assert num_checked >= 2


PERCENT = re.compile(r"[-+]?\d+\.\d\b")
TWO_ANSWERS = 100 * 2 / 87
"""Of the sample's test split, in percentage points: on another processor a training that reaches the same validation
gave one other answer to 87 questions with other images."""


def is_alike(shown: str, printed: str) -> bool:
    """Whether lines about other images are the same apart from two answers in their percentages."""
    if not shown.startswith("shuffled images"):
        return False
    pairs = zip(PERCENT.findall(shown), PERCENT.findall(printed), strict=False)
    is_near = all(abs(float(one) - float(other)) <= TWO_ANSWERS for one, other in pairs)
    return is_near and PERCENT.sub("%", shown) == PERCENT.sub("%", printed)


def scores(run: RunFile, *baselines: Baseline) -> Score:
    """The scores of both held-out splits together."""
    found = [evaluate_run(run.output, split, baselines)[0].overall for split in SPLITS]
    total = sum(score.num_questions for score in found)

    def mean(name: str) -> float:
        return sum(getattr(score, name) * score.num_questions for score in found) / total

    return Score(total, mean("exact_match"), mean("majority"))


def test_it_beats_the_majority_baseline_on_held_out_images(trained):
    score = scores(trained)
    assert score.exact_match >= score.majority + 0.20


@pytest.mark.guarantee(
    "The trained model uses the image: with images swapped, its accuracy falls to the majority baseline."
)
def test_with_other_images_accuracy_falls_to_the_majority_baseline(trained):
    score = scores(trained, "shuffled")
    assert score.exact_match <= score.majority + 0.05


@pytest.mark.guarantee(
    "The adapter loads with stock PEFT on the stock model, tower included, and gives the same answers."
)
def test_stock_peft_on_the_stock_model_gives_the_same_answers(trained, sample, stock_processor):
    evaluate_run(trained.output, "test")
    lines = (trained.output / "predictions" / "test.jsonl").read_text().splitlines()
    asked = [json.loads(line) for line in lines][-NUM_ASKED:]
    model = Qwen3VLForConditionalGeneration.from_pretrained(sample / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(trained.output / "adapter")).eval()
    processor = stock_processor(sample / "model")
    for line in asked:
        answer = stock_answer(model, processor, line, trained.eval.max_new_tokens)
        assert answer == line["predicted"], line


def test_the_summary_has_the_figures_of_the_run(trained, sample):
    summary = Summary.read(RunFolder(trained.output))
    num_records = len(read_records(sample / "train.jsonl"))
    assert (summary.num_files, summary.num_distinct) == (66, 64)
    assert summary.num_samples == num_records * trained.train.epochs
    text = summary.text()
    for words in ("66 files, 64 distinct", "exact match", "majority", "adapter"):
        assert words in text
    assert (trained.output.parents[1] / summary.adapter / "adapter_config.json").exists()
    assert "lookonce predict runs/sample --image " in summary.next_command
