"""A run folder has one owner: what changes it is refused while another living process uses it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from lookonce.claim_file import Process
from lookonce.cli import main
from lookonce.errors import LookonceError, RunFolderError
from lookonce.eval.answerer import Answerer
from lookonce.eval.run import evaluate_run
from lookonce.files import TEMPORARY_MARK
from lookonce.run.config import RunFile
from lookonce.run.folder import CLAIM, RunFolder
from lookonce.status import find_training
from lookonce.workflow import train

pytestmark = pytest.mark.guarantee(
    "No command changes a run folder that another live process uses, here or on another machine; a killed "
    "process frees the folder."
)

QUIET = {"notify": lambda note: None}
AT_INPUTS = "lookonce.run.open:OpenRun.open_cache"
AT_STEP = "lookonce.train.loop.log_files:MetricsLog.on_step_begin"
AT_ADAPTER = "lookonce.train.loop.distributed:Ranks.disband"
AT_ANSWERS = "lookonce.workflow.evaluate"
AT_EVAL = "lookonce.eval.run.evaluate"
TRAIN = ("train", "run.yaml")
ONLY_READ = ("train", "train --resume")
"""What prints the summary of a run that is still finished."""


@pytest.fixture(scope="module")
def options(built) -> dict[str, dict[str, object]]:
    few = {"max_new_tokens": 1}
    steps = {"steps": 2, "save_steps": 1, "scheduler": "constant"}
    return {"cache": {"dir": str(built.folder.parent)}, "train": steps, "eval": few}


@pytest.fixture
def run(make_run, options, tmp_path: Path) -> RunFile:
    found = make_run(**options)
    (tmp_path / "run.yaml").write_text(found.to_yaml())
    return found


@pytest.fixture(scope="module")
def trained(make_run_in, options, tmp_path_factory) -> Path:
    """The folder of the same run, finished."""
    run = make_run_in(tmp_path_factory.mktemp("trained"), **options)
    train(run, **QUIET)
    return run.output


@pytest.fixture
def finished(run: RunFile, trained: Path) -> RunFile:
    """The run, finished."""
    shutil.copytree(trained, run.output)
    return run


@pytest.fixture
def changes(run: RunFile) -> dict[str, Callable[[], object]]:
    """What changes a run folder."""
    return {
        "train": lambda: train(run, **QUIET),
        "train --resume": lambda: train(run, resume=True, **QUIET),
        "train --restart": lambda: train(run, restart=True, **QUIET),
        "eval": lambda: evaluate_run(run.output),
    }


def contents(folder: Path) -> dict[Path, bytes]:
    """The files of a folder, without those that its owner rewrites while it waits."""
    names = {CLAIM, "progress.json"}
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in names}


@pytest.mark.parametrize(
    ("at", "words", "allowed"), [(AT_INPUTS, TRAIN, ()), (AT_ANSWERS, TRAIN, ()), (AT_EVAL, ("eval", "run"), ONLY_READ)]
)
def test_a_folder_in_use_is_not_changed_by_another_process(run, trained, paused, changes, at, words, allowed):
    if words != TRAIN:
        shutil.copytree(trained, run.output)
    process = paused(at, *words)
    before = contents(run.output)
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(json.loads((run.output / CLAIM).read_text())["started"]))
    named = (
        rf"in use by `lookonce {words[0]}`: process {process.pid} on \S+, since {since}:\d\d; wait until it has ended"
    )
    for name in changes.keys() - set(allowed):
        if name == "eval" and not (run.output / "run.json").exists():
            continue  # nothing to evaluate yet
        with pytest.raises(RunFolderError, match=named):
            changes[name]()
        assert contents(run.output) == before, name
    assert not run.output.with_name("run.old-2").exists()
    paused.go_on()
    assert process.wait() == 0, process.error
    assert (run.output / "summary.json").exists() and not (run.output / CLAIM).exists()


def test_a_killed_owner_frees_the_folder_at_once(run, paused, changes):
    process = paused(AT_ANSWERS, *TRAIN)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (run.output / CLAIM).exists()
    changes["train --resume"]()
    assert not (run.output / CLAIM).exists()


@pytest.mark.parametrize("at", [AT_INPUTS, AT_STEP])
def test_a_signalled_owner_leaves_no_claim(run, paused, at):
    process = paused(at, *TRAIN)
    state = find_training(RunFolder(run.output), 180)
    assert (state.state, state.phase) == ("running", "loading" if at == AT_INPUTS else "training")
    os.kill(process.pid, signal.SIGTERM)
    if at == AT_STEP:
        paused.go_on()
    assert process.wait() == 75 and not (run.output / CLAIM).exists(), process.error
    assert run.output.exists() == (at != AT_INPUTS)


@pytest.mark.parametrize("change", ["train", "eval"])
def test_an_owner_on_another_machine_is_alive_until_its_heartbeat_expires(finished, changes, backdate, change):
    run = finished
    if change.startswith("train"):
        (run.output / "summary.json").unlink()
    there = replace(Process.this(), machine="elsewhere", host="node7", pid=4711, job="12_3")
    content = {"worker": asdict(there), "command": "lookonce train", "started": 0.0}
    (run.output / CLAIM).write_text(json.dumps(content))
    before = contents(run.output)
    with pytest.raises(RunFolderError, match=r"process 4711 on node7, job 12_3, since .*last sign of life 0 s ago"):
        changes[change]()
    assert contents(run.output) == before
    backdate(run.output / CLAIM, run.cache.claim_s + 1)
    if change == "train":
        with pytest.raises(RunFolderError, match="add --resume"):
            changes[change]()
    else:
        changes[change]()
    assert not (run.output / CLAIM).exists()


@pytest.mark.parametrize("at", [AT_STEP, AT_ADAPTER, AT_ANSWERS])
def test_a_suspended_owner_that_lost_its_claim_ends_without_writing(run, paused, backdate, at):
    process = paused(at, *TRAIN)
    os.kill(process.pid, signal.SIGSTOP)
    backdate(run.output / CLAIM, run.cache.claim_s + 1)
    train(run, restart=True, **QUIET)
    before = contents(run.output) | {run.output: (run.output / "progress.json").read_bytes()}
    paused.go_on()
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait() == 1
    assert "was taken over by another process or moved while this one was suspended" in process.error
    assert contents(run.output) | {run.output: (run.output / "progress.json").read_bytes()} == before


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": {"train": "nowhere.jsonl"}}, "no records file"),
        ({"batch": {"tokens_per_pack": 8}}, "no supervised token"),
    ],
)
def test_a_failed_start_changes_nothing(run, make_run, options, trained, wrong, message, restart):
    if restart:
        shutil.copytree(trained, run.output)
    before = contents(run.output)
    mistaken = make_run(**{name: options.get(name, {}) | wrong.get(name, {}) for name in options | wrong})
    with pytest.raises(LookonceError, match=message):
        train(mistaken, restart=restart, **QUIET)
    assert contents(run.output) == before and run.output.exists() == restart
    assert not (run.output / CLAIM).exists()


class Watched:
    """What this process does in a run folder, and whether it has claimed the folder then."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_on = folder.absolute(), False
        self.unclaimed: list[str] = []
        """Files that were written, renamed or removed without a claim."""
        self.read: list[str] = []
        """Files that were read before the claim."""
        self.commands: set[str] = set()
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.is_on or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"):
            return
        for name in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
            path = Path(os.fsdecode(name)) if isinstance(name, str | bytes | os.PathLike) else Path("/")
            path = path.absolute()
            if path == self.folder and event != "os.rename":
                continue  # it is made for the claim
            if not path.is_relative_to(self.folder) or path.name.partition(TEMPORARY_MARK)[0] in (CLAIM, "pulse"):
                continue
            self.is_on = False  # not for what is read here
            try:
                claim = self.folder / CLAIM
                mine = claim.exists() and json.loads(claim.read_text())["worker"]["pid"] == os.getpid()
                self.commands |= {json.loads(claim.read_text())["command"]} if mine else set()
            finally:
                self.is_on = True
            reads = event == "open" and not int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not mine:
                (self.read if reads else self.unclaimed).append(f"{event} {path.relative_to(self.folder)}")


@pytest.fixture
def watched(finished: RunFile) -> Iterator[Watched]:
    found = Watched(finished.output)
    yield found
    found.is_on = False  # an audit hook stays


WRITERS = {
    "train": (*TRAIN, "--restart"),
    "eval": ("eval", "run"),
    "report": ("report", "run", "-o", "run/page.html"),
    "export": ("export", "run", "--to", "medvqa-gi", "-o", "run/answers.json"),
    "predict": ("predict", "run", "--image", "a.jpg", "--question", "Is there text?", "-o", "run/asked.jsonl"),
    "adapter merge": ("adapter", "merge", "run", "run/merged"),
}
"""Commands that write into a run folder."""
TO_FIND_IT = {"run.json", "run.yaml", "summary.json"}
"""What is read before the claim: who claims how long, and whether anything is to be done."""


@pytest.mark.parametrize("name", WRITERS)
def test_whatever_writes_into_a_run_folder_claims_it_before_it_reads_there(
    finished, watched, sample, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    shutil.copy(next((sample / "images").iterdir()), "a.jpg")
    watched.is_on = True
    result = CliRunner().invoke(main, list(WRITERS[name]))
    watched.is_on = False
    assert result.exit_code == 0, result.output
    assert watched.unclaimed == [] and len(watched.commands) == 1
    assert {one.split()[-1] for one in watched.read} <= TO_FIND_IT
    assert not (finished.output / CLAIM).exists()


def test_a_run_folder_that_another_process_uses_is_read_and_not_written_to(finished, paused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jpg").touch()
    process = paused(AT_EVAL, "eval", "run")
    before = contents(finished.output)
    for name, words in WRITERS.items():
        result = CliRunner().invoke(main, list(words))
        assert result.exit_code == 1 and f"in use by `lookonce eval`: process {process.pid} on" in result.stderr, name
        assert contents(finished.output) == before, name
    assert Answerer.open(finished.output).answer((), "Is there text?")
    assert find_training(RunFolder(finished.output), 180).state == "finished"
