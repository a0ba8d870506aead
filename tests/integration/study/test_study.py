"""A study on the sample: killed, stopped, continued and reported; its runs are those of single commands."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file
from support.html_page import as_text
from support.rows import run

from lookonce.cache.store.reader import VisionCache
from lookonce.run.folder import RunFolder
from lookonce.run.log_file import read_drawn

VARIANTS = {
    "later": {"starts_from": "plain", "train.steps": 4},
    "plain": None,
    "classic": {"batch.questions_per_image": 1},
    "broken": {"batch.max_tokens": 5},
    "after": {"starts_from": "broken"},
}


@pytest.fixture
def study(study_of, make_run, built: VisionCache):
    options = {"steps": 16, "save_steps": 4}
    data = {"val": [], "test": []}
    run = make_run(data=data, cache={"dir": str(built.folder.parent)}, train=options, batch={"samples_per_step": 4})
    return study_of(run.to_yaml())


def adapter(folder: Path) -> dict:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.mark.guarantee("A study names the runs that fail, and finishes all others.")
@pytest.mark.guarantee("A study that is killed and stopped ends with the adapters of one that is not, bit for bit.")
def test_a_study_that_is_killed_and_stopped_ends_like_one_that_is_not(study, tmp_path):
    output = study.write("first", VARIANTS)
    process = study.start("run", "first.yaml", "--parallel", "2")
    plain = RunFolder(output / "plain-1")
    process.wait_until(lambda: plain.last_checkpoint)
    children = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, timeout=60)
    assert children and not any(child.is_running() for child in children)

    process = study.start("run", "first.yaml", "--parallel", "2")
    process.wait_until(lambda: "classic-1: started" in process.error)
    os.kill(process.pid, signal.SIGHUP)
    assert process.wait() == 75, process.error
    assert "SIGHUP sent to the jobs; waiting for" in process.error and "run the same command again" in process.error

    said = study("run", "first.yaml", code=1)
    assert "broken-1 failed: " in said and "see first/logs/broken-1.log" in said and "439 longer than" in said
    assert "after-1 is skipped, because broken-1 failed" in said and "3 of 5 runs complete" in said
    assert "resuming from checkpoint-" in (output / "logs" / "plain-1.log").read_text()

    other = study.write("second", {name: VARIANTS[name] for name in ("plain", "later")})
    study("run", "second.yaml")
    for name in ("plain-1", "later-1"):
        one, two = adapter(output / name), adapter(other / name)
        assert one.keys() == two.keys() and all((one[key] == two[key]).all() for key in one), name
    assert "training starts with the adapter of" in (other / "logs" / "later-1.log").read_text()


def test_a_study_is_run_and_changed(study, tmp_path):
    variants = {"plain": None, "later": {"starts_from": "plain", "train.steps": 2}}
    questions = Path(yaml.safe_load(study.base)["data"]["train"][0]).parent / "val.jsonl"
    study.base = study.base.replace("  val: []", f"  val: [{questions}]").replace("steps: 16", "steps: 4")
    study.write("asked", variants)
    said = json.loads(study("run", "asked.yaml", "--json"))
    assert said["done"] == ["cache of plain-1", "plain-1", "later-1"]
    assert all(one["is_complete"] and one["score"]["num_questions"] > 0 for one in said["runs"])
    study.write("asked", variants | {"later": {"starts_from": "plain", "train.steps": 3}})
    refused = study.start("run", "asked.yaml")
    assert refused.wait() == 2 and "later-1: run.train.steps: now 3, trained with 2" in refused.error
    assert "2 of 2 runs complete" in study("run", "asked.yaml", "--again")
    assert RunFolder(tmp_path / "asked" / "later-1").read_trained().num_steps == 3
    assert (tmp_path / "asked" / "later-1.old-1" / "adapter").exists()
    assert "2 of 2 runs complete" in study("run", "asked.yaml", "--again")  # again: nothing is outdated


def test_two_studies_at_once_share_the_runs(study, tmp_path):
    """What one of them trains, the other waits for, and counts neither as failed nor as its own to train."""
    output = study.write("both", {"plain": None, "classic": {"batch.questions_per_image": 1}})
    processes = [study.start("run", "both.yaml") for _ in range(2)]
    for process in processes:
        assert process.wait() == 0, process.error
    for name in ("plain-1", "classic-1"):
        assert (output / name / "summary.json").exists()
        assert (output / "logs" / f"{name}.log").read_text().count("step 16/16") == 1
    assert not any("failed" in process.error or "skipped" in process.error for process in processes)


def test_a_variant_that_learns_from_rewards_is_trained_compared_and_shown(study, tmp_path):
    """Its questions are turns of conversations, and some have no image; bench step refuses its run file."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = Path(yaml.safe_load(study.base)["data"]["train"][0])
    [first, second, third] = [json.loads(line) for line in records.read_text().splitlines()[:3]]
    turns = [{"question": "Hello?", "answer": "yes"}, *first["turns"], *second["turns"]]
    images = [str(records.parent / name) for name in first["images"]]
    asked = [{"images": images, "turns": turns}, {"images": [], "turns": third["turns"]}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in asked))
    study.base = study.base.replace("  val: []", f"  val: [{records.parent / 'val.jsonl'}]").replace("16", "4")
    rewarded = {"data.train": "asked.jsonl", "train.objective": "grpo", "grpo.reward": {"format": 1, "token_f1": 2}}
    rewarded |= {"starts_from": "plain", "train.steps": 3, "train.logging_steps": 1, "train.track": "tensorboard"}
    rewarded |= {"grpo.max_new_tokens": 4, "grpo.cut": "kept", "grpo.filter": False, "grpo.kl": 0.1}
    output = study.write("shown", {"plain": None, "rewarded": rewarded})
    assert "2 of 2 runs complete" in study("run", "shown.yaml")

    drawn = read_drawn(output / "rewarded-1" / "drawn.jsonl")
    assert {line.step for line in drawn} == {1, 2, 3} and all(len(line.answers) == 8 for line in drawn)
    assert {line.question for line in drawn} <= {turn["question"] for record in asked for turn in record["turns"]}
    report = json.loads(study("report", "shown.yaml", "--json"))
    assert [variant["variant"] for variant in report["variants"]] == ["plain", "rewarded"]
    page = as_text((output / "report.html").read_text())
    assert all(words in page for words in ("Answers drawn while training", "mean reward", "were mixed", "% sampling"))

    run_file = output / "run-files" / "rewarded-1.yaml"
    state = json.loads(run("status", run_file, "--json").stdout)
    assert state["training"]["reward"] is not None and 0 <= state["training"]["mixed_share"] <= 1
    events = EventAccumulator(str(output / "rewarded-1" / "tensorboard")).Reload()
    tags = {f"train/{name}" for name in ("reward", "mixed_share", "entropy", "answer_tokens", "kl", "sampling_seconds")}
    assert tags <= set(events.Tags()["scalars"])
    refused = run("bench", "step", run_file)
    assert refused.exit_code == 2 and "--set train.objective=sft" in refused.stderr
