"""A study on the sample: killed, stopped, continued and reported; its runs are those of single commands."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file
from support.processes import Preloaded, Process

from lookonce.cache.store.reader import VisionCache
from lookonce.run.folder import RunFolder

STUDY = """
import os, sys
import lookonce.study.pool as pool
from lookonce.cli import main

class Forked:
    '''A process of the pool, forked from this one, which has imported everything already.'''

    def __init__(self, command, env, stdin, stdout, stderr, start_new_session, preexec_fn):
        assert command[1:3] == ["-m", "lookonce"] and start_new_session
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            os.setsid()
            preexec_fn()
            for descriptor in (1, 2):
                os.dup2(stdout.fileno(), descriptor)
            try:
                main(command[3:])
            except SystemExit as end:
                os._exit(end.code or 0)
            finally:
                os._exit(99)

    def poll(self):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

pool.subprocess.Popen, pool.INTERVAL_S = Forked, 0.02
main(["study", *sys.argv[1:]])
"""
ARMS = {
    "later": {"starts_from": "plain", "train.steps": 4},
    "plain": None,
    "classic": {"batch.questions_per_image": 1},
    "broken": {"batch.max_tokens": 5},
    "after": {"starts_from": "broken"},
}


@dataclass
class Study:
    """Runs `lookonce study` on a study file in a folder."""

    preloaded: Preloaded
    folder: Path
    base: str
    number: int = 0
    """How many commands were started; each has an output of its own."""

    def write(self, name: str, arms: dict) -> Path:
        (self.folder / "base.yaml").write_text(self.base)
        study = {"base": "base.yaml", "seeds": [1], "output": name, "arms": arms, "compare": {"baseline": "plain"}}
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
        return self.folder / name

    def start(self, *words: str) -> Process:
        self.number += 1
        (self.folder / f"started{self.number}.err").touch()  # read before the process has begun to write
        return self.preloaded.start(STUDY, *words, folder=self.folder, name=f"started{self.number}")

    def __call__(self, *words: str, code: int = 0) -> str:
        process = self.start(*words)
        assert process.wait() == code, process.error
        return process.out


@pytest.fixture
def study(preloaded: Preloaded, make_run, built: VisionCache, tmp_path: Path) -> Study:
    options = {"steps": 24, "save_steps": 4}
    data = {"val": [], "test": []}
    run = make_run(data=data, cache={"dir": str(built.folder.parent)}, train=options, batch={"samples_per_step": 4})
    return Study(preloaded, tmp_path, run.to_yaml())


def adapter(folder: Path) -> dict:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_a_study_that_is_killed_and_stopped_ends_like_one_that_is_not(study, tmp_path):
    output = study.write("first", ARMS)
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
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 75, process.error
    assert "SIGTERM passed on; waiting for" in process.error and "run the same command again" in process.error

    said = study("run", "first.yaml", code=1)
    assert "broken-1 failed: " in said and "see first/logs/broken-1.log" in said and "439 longer than" in said
    assert "after-1 is skipped, because broken-1 failed" in said and "3 of 5 runs complete" in said
    assert "resuming from checkpoint-" in (output / "logs" / "plain-1.log").read_text()

    other = study.write("second", {name: ARMS[name] for name in ("plain", "later")})
    study("run", "second.yaml")
    for name in ("plain-1", "later-1"):
        one, two = adapter(output / name), adapter(other / name)
        assert one.keys() == two.keys() and all((one[key] == two[key]).all() for key in one), name
    assert "training starts with the adapter of" in (other / "logs" / "later-1.log").read_text()


def test_a_study_is_planned_run_changed_and_reported(study, tmp_path):
    arms = {"plain": None, "later": {"starts_from": "plain", "train.steps": 2}}
    questions = Path(yaml.safe_load(study.base)["data"]["train"][0]).parent / "val.jsonl"
    study.base = study.base.replace("  val: []", f"  val: [{questions}]").replace("steps: 24", "steps: 4")
    study.write("asked", arms)
    assert "2 runs, " in study("plan", "asked.yaml", "--rate", "5")
    said = json.loads(study("run", "asked.yaml", "--json"))
    assert said["done"] == ["cache of plain", "plain-1", "later-1"]
    assert all(one["is_complete"] and one["score"]["num_questions"] > 0 for one in said["runs"])
    report = json.loads(study("report", "asked.yaml", "--json"))
    assert [(pair["first"], pair["second"]) for pair in report["pairs"]] == [("plain", "later")]
    assert (tmp_path / "asked" / "report.html").exists()
    study.write("asked", arms | {"later": {"starts_from": "plain", "train.steps": 3}})
    refused = study.start("run", "asked.yaml")
    assert refused.wait() == 2 and "later-1: run.train.steps: now 3, trained with 2" in refused.error
    assert "2 of 2 runs complete" in study("run", "asked.yaml", "--again", "later")
    assert RunFolder(tmp_path / "asked" / "later-1").read_trained().num_steps == 3
    assert (tmp_path / "asked" / "later-1.old-1" / "adapter").exists()
    assert "2 of 2 runs complete" in study("run", "asked.yaml", "--again", "later")  # again: nothing is outdated
