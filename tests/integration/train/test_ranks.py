"""Training with several ranks: the results of one rank, and all ranks end together."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TOLERANCE = 1e-5

WATCHED = Path(__file__).with_name("watched_training.py")


@dataclass
class Ended:
    """What the ranks of a training have left when all have ended."""

    codes: list[int]
    out: str
    error: str


def command_of(folder, run, *flags, **watch):
    """Arguments of watched_training.py, whose ranks write files about themselves to `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(run.to_yaml())
    return [json.dumps({"folder": str(folder)} | watch), "train", str(folder / "run.yaml"), *flags]


@pytest.fixture
def run_ranks(preloaded):
    """Runs a training to its end on the CPU, with one process a rank."""

    def run_ranks(folder, run, *flags, num_ranks=2, **watch):
        arguments = command_of(folder, run, *flags, **watch)
        ranks = preloaded.start_ranks(num_ranks, WATCHED.read_text(), *arguments, folder=folder)
        codes = [rank.wait() for rank in ranks]
        return Ended(codes, "".join(rank.out for rank in ranks), "".join(rank.error for rank in ranks))

    return run_ranks


@pytest.fixture
def trained(run_ranks):
    """Runs a training that must succeed."""

    def trained(*arguments, **options):
        ended = run_ranks(*arguments, **options)
        assert set(ended.codes) == {0}, ended.error
        return ended

    return trained


def torchrun(folder, run, *flags, num_ranks=2, on_gpu=False, **watch):
    """Start a training by torchrun, or without it for a single rank."""
    launcher = [*TORCHRUN, str(num_ranks)] if num_ranks > 1 else [sys.executable]
    command = [*launcher, str(WATCHED), *command_of(folder, run, *flags, **watch)]
    environment = os.environ | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, start_new_session=True, env=environment, **pipes)


def error_of(process, timeout_s=300):
    """Wait until it ends; its stderr. A process that hangs is killed with all processes that it has started."""
    try:
        return process.communicate(timeout=timeout_s)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def assert_close(found: Path, expected: Path) -> None:
    found, expected = load_file(found), load_file(expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= TOLERANCE * tensor.norm(), name


def assert_equal(found: Path, expected: Path) -> None:
    found, expected = load_file(found), load_file(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def losses(run):
    lines = [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
    kinds = ("loss", "eval_loss", "eval_num_questions", "eval_score")
    return [[line.get(kind) for kind in kinds if kind in line] for line in lines]


@pytest.fixture
def make(make_cached_run, sample, tmp_path):
    """Makes runs without dropout over 87 questions: steps of 43, 43, 1 (too few for two ranks) and, once more, 43."""
    [one] = (sample / "test.jsonl").read_text().splitlines()[:1]
    (tmp_path / "one.jsonl").write_text(one + "\n")

    def make(name, val=None, train=None, every=None, **batch):
        questions = str(sample / "test.jsonl")
        data = {"train": questions, "val": str(val or questions), "test": [], "image_root": str(sample)}
        schedule = {"steps": 4, "eval_steps": 1, "save_steps": 2, "best": "loss"}
        return make_cached_run(
            data=data,
            batch={"samples_per_step": 43} | batch,
            train=schedule | {"max_grad_norm": 0.5} | (train or {}),
            eval={"split": "test", "every": every, "metric": "bleu" if every else "exact_match"},
            output=str(tmp_path / name),
        )

    return make


@pytest.mark.guarantee("Two, four or eight processes together compute the same gradient of a step as one process.")
@pytest.mark.parametrize(
    ("num_ranks", "batch", "val", "variant"),
    [
        (2, {"mode": "shared", "tokens_per_pack": 400}, "one.jsonl", "ddp"),
        (2, {"mode": "shared", "tokens_per_pack": 600}, None, "fsdp"),
        (2, {"mode": "shared", "tokens_per_pack": 400}, None, "captured"),
        (4, {"mode": "separate", "samples_per_forward": 16}, None, "ddp"),
        (4, {"mode": "packed", "tokens_per_pack": 800}, None, "fsdp"),
        (8, {"mode": "shared", "tokens_per_pack": 4000}, "one.jsonl", "captured"),
    ],
)
def test_several_ranks_give_the_results_of_one(make, trained, tmp_path, num_ranks, batch, val, variant):
    """With DDP, with sharded weights, and with captured passes, whose gradients the ranks exchange without DDP.

    In the first and the last case the ranks validate on a single sample, and with DDP and FSDP they use gradient
    checkpointing. A step of one question has fewer samples than there are ranks, and steps of four and eight ranks are
    split into more packs than fit. Where weights are whole, the ranks also share the questions that are answered while
    training. With two ranks and DDP the first one evaluates only when the other has ended.
    """
    fsdp, val = variant == "fsdp", val and tmp_path / val
    every = None if fsdp else 3
    checkpointing = {"fsdp": True, "ddp": "selective"}.get(variant, False)
    one = make("one", val, every=every, **batch)
    several = make("several", val, {"fsdp": fsdp, "gradient_checkpointing": checkpointing}, every, **batch)
    alone, together = tmp_path / "alone", tmp_path / "together"
    trained(alone, one, num_ranks=1)
    watch = {"captured": variant == "captured", "waits_for_others": variant == "ddp" and num_ranks == 2}
    ended = trained(together, several, num_ranks=num_ranks, **watch)
    assert ("captured" in ended.error) == (variant == "captured")
    for step in range(4):
        names = [f"gradients-{step}-{rank}.safetensors" for rank in range(num_ranks)]
        assert_close(together / names[0], alone / names[0])
        for name in names[1:]:
            assert_equal(together / names[0], together / name)
        assert len({(together / f"validation-{step + 1}-{rank}").read_text() for rank in range(num_ranks)}) == 1
    for in_several, in_one in zip(losses(several), losses(one), strict=True):
        assert in_several == pytest.approx(in_one, rel=TOLERANCE)
    assert_close(
        several.output / "adapter" / "adapter_model.safetensors", one.output / "adapter" / "adapter_model.safetensors"
    )
    for rank in range(1, num_ranks):
        assert_equal(together / "weights-0.safetensors", together / f"weights-{rank}.safetensors")
    lines = [line for line in ended.error.splitlines() if line.startswith("step ") and "grad" in line]
    assert [line.split()[1] for line in lines] == [f"{step}/4" for step in range(1, 5)]
    assert ended.out.count("4 steps") == 1
    held, of_all = (int((notes / "held-0").read_text()) for notes in (together, alone))
    assert held == of_all if not fsdp else held < 0.6 * of_all


@pytest.mark.guarantee("Two processes together compute the same gradient of a step as one process.")
@pytest.mark.parametrize("captured", [False, True])
def test_two_ranks_draw_the_answers_of_one_and_learn_the_same(make, trainings, trained, tmp_path, captured):
    """Of a training by rewards, with several steps for the same answers; what is logged is of both."""
    rewards = {"reward": {"format": 1.0, "token_f1": 2.0}, "samples": 4, "max_new_tokens": 4}
    grpo = rewards | {"iterations": 2, "kl": 0.1, "clip": [0.01, 0.01]}
    begun = trainings.uninterrupted("shared", steps=60, save_steps=60, eval_steps=60, learning_rate=0.01)
    start = {"objective": "grpo", "start_from": str(begun.output), "learning_rate": 0.003}
    options = start | {"logging_steps": 1, "eval_steps": None, "best": None}
    one, two = (make(name, train=options, samples_per_step=7, tokens_per_pack=400) for name in ("one", "two"))
    one, two = (run.model_copy(update={"grpo": run.grpo.model_copy(update=grpo)}) for run in (one, two))
    trained(tmp_path / "alone", one, num_ranks=1)
    ended = trained(tmp_path / "together", two, captured=captured)
    assert ("captured" in ended.error) == captured
    names = ("adapter_model.safetensors", "adapter")
    assert_close(*(run.output / names[1] / names[0] for run in (two, one)))
    drawn = [(run.output / "drawn.jsonl").read_text() for run in (two, one)]
    assert drawn[0] == drawn[1] and drawn[0].count("\n") == 8
    seconds = ("time", "second", "seconds", "share")
    for lines in zip(*((run.output / "log.jsonl").read_text().splitlines() for run in (two, one)), strict=True):
        of_two, of_one = (
            {name: value for name, value in json.loads(line).items() if name.rpartition("_")[2] not in seconds}
            for line in lines
        )
        assert of_two == pytest.approx(of_one, rel=1e-3, abs=2e-6) and of_one.get("kl", 0) >= 0


@pytest.mark.skipif(
    'device.type != "cpu"' not in inspect.getsource(Trainer._load_optimizer_and_scheduler),
    reason="this transformers cannot resume on a CPU with several ranks (it asks torch for the device cpu:0)",
)
def test_ranks_stop_and_resume_together_whichever_gets_the_signal(trainings, trained, run_ranks, tmp_path):
    """First one rank gets a signal; then all ranks and torchrun itself."""
    run = trainings.unstarted("shared", steps=14)
    uninterrupted = run.model_copy(update={"output": tmp_path / "uninterrupted"})
    trained(tmp_path / "notes-uninterrupted", uninterrupted)
    notes = tmp_path / "notes"

    stopped = run_ranks(notes, run, signal=[5, 1])
    assert stopped.codes == [75, 0]  # only the first rank reports
    assert stopped.error.count("Error: stopped by SIGUSR1 after step 6 of 14, which is saved") == 1
    assert "Traceback" not in stopped.error

    process = torchrun(notes, run, "--resume", sleep=0.1)
    wait_for(lambda: (run.output / "log.jsonl").read_text().count("\n") >= 9, process)
    os.killpg(process.pid, signal.SIGTERM)
    error = error_of(process)
    assert process.returncode != 0
    [step] = re.findall(r"Error: stopped by SIGTERM after step (\d+) of 14, which is saved", error)
    assert trainings.checkpoints(run)[-1] == int(step) >= 7

    assert trained(notes, run, "--resume").error.count(f"resuming from checkpoint-{step}\n") == 1
    trainings.assert_same_adapter(run, uninterrupted)
    assert trainings.log(run) == trainings.log(uninterrupted)


def wait_for(condition, process, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("rank", "named"), [(0, ""), (1, "rank 1: ")])
def test_a_failure_of_one_rank_ends_all_without_torchrun(trainings, run_ranks, tmp_path, rank, named):
    ended = run_ranks(tmp_path / "notes", trainings.unstarted("shared"), fail=[5, rank])
    assert 0 not in ended.codes
    assert f"Error: {named}unexpected RuntimeError: this rank has failed" in ended.error
    other = "rank 1: " if rank == 0 else ""
    assert f"Error: {other}another process of this command has ended or does not answer; " in ended.error
    assert "then run the same command with --resume to continue" in ended.error and "gloo" not in ended.error


def test_a_refused_run_is_reported_once(trainings, run_ranks, tmp_path):
    ended = run_ranks(tmp_path / "notes", trainings.uninterrupted("shared"), "--set", "train.learning_rate=1")
    assert ended.codes == [1, 0]
    assert ended.error.count("holds another run") == 1 and "rank 1: " not in ended.error


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus_two_ranks_differ_from_one_no_more_than_bfloat16_from_float32(make, tmp_path):
    """With NCCL, compilation and FlexAttention."""
    variants = {
        "exact": (1, {"precision": "fp32", "compile": False}),
        "one": (1, {"precision": "bf16"}),
        "two": (2, {"precision": "bf16"}),
        "sharded": (2, {"precision": "bf16", "fsdp": True}),
    }
    no_validation = {"steps": 1, "save_steps": 1, "best": None}
    processes = {}
    for name, (num_ranks, train) in variants.items():
        run = make(name, train=no_validation | train, mode="shared", tokens_per_pack=1024)
        run = run.model_copy(update={"data": run.data.model_copy(update={"val": []})})
        processes[name] = torchrun(tmp_path / f"notes-{name}", run, num_ranks=num_ranks, on_gpu=True)
    gradients = {}
    for name, process in processes.items():
        error = error_of(process)
        assert process.returncode == 0, error
        weights = load_file(tmp_path / f"notes-{name}" / "gradients-0-0.safetensors")
        gradients[name] = torch.cat([weights[key].flatten().double() for key in sorted(weights)]).cpu()
    rounding = (gradients["one"] - gradients["exact"]).norm()
    for name in ("two", "sharded"):
        assert 0 < (gradients[name] - gradients["one"]).norm() <= rounding, name
