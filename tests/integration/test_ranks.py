"""Training in several processes, as torchrun starts them: what one process would do, and all end together."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from lookonce.run.inputs import Inputs

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TOLERANCE = 1e-5

WATCHED = """
import json, os, signal, sys, time
from pathlib import Path
from safetensors.torch import save_file
import lookonce.train.train as run
import lookonce.workflow.train as workflow
from lookonce.cli import main

watch, arguments = json.loads(sys.argv[1]), sys.argv[2:]
rank, folder = int(os.environ.get("RANK", 0)), Path(watch["folder"])

def note(name, tensors):
    save_file({key: value.detach().clone() for key, value in tensors.items()}, folder / f"{name}-{rank}.safetensors")

class Watched(run.StepLines):
    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        weights = [getattr(weight, "_local_tensor", weight) for weight in kwargs["model"].parameters()]
        (folder / f"held-{rank}").write_text(str(sum(weight.numel() for weight in weights)))

    def on_step_begin(self, args, state, control, **kwargs):
        super().on_step_begin(args, state, control, **kwargs)
        time.sleep(watch.get("sleep", 0))
        if [state.global_step, rank] == watch.get("signal"):
            os.kill(os.getpid(), signal.SIGUSR1)
        if [state.global_step, rank] == watch.get("fail"):
            raise RuntimeError("this rank has failed")

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
        note(f"gradients-{state.global_step}", gradients)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        (folder / f"validation-{state.global_step}-{rank}").write_text(repr(metrics["eval_loss"]))

    def on_train_end(self, args, state, control, model=None, **kwargs):
        note("weights", {name: weight for name, weight in model.named_parameters() if weight.requires_grad})

evaluate = workflow.evaluate

def evaluate_alone(*arguments):
    other = int((folder / "pid-1").read_text())
    deadline = time.monotonic() + 20
    while watch.get("waits_for_others") and Path(f"/proc/{other}/status").exists():
        if "zombie" in Path(f"/proc/{other}/status").read_text():
            break
        assert time.monotonic() < deadline, "the other rank waits for this one"
        time.sleep(0.05)
    return evaluate(*arguments)

def record_on_cpu():
    # as on a GPU, but what is recorded is done anew each time, and no memory is measured
    from contextlib import nullcontext
    from dataclasses import replace
    from types import SimpleNamespace
    import torch
    from lookonce.train.loop import session, trainer
    from lookonce.train.data.batches import Feed
    make = Feed.of
    Feed.of = lambda *given, **more: replace(make(*given, **more), in_blocks=True)
    session.can_record = lambda *given: True
    trainer.cuda_graphs = lambda: lambda function: function
    torch.random.fork_rng = lambda devices: nullcontext()
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda: None)
    torch.cuda.max_memory_allocated = torch.cuda.memory_reserved = lambda: 0
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=1)

if watch.get("recorded"):
    record_on_cpu()
run.StepLines, workflow.evaluate = Watched, evaluate_alone
main(arguments)
"""


def start(folder, run, *flags, ranks=2, on_gpu=False, **watch):
    """A training in so many processes, whose ranks leave notes in `folder`; on the CPU if it is not to be on GPUs."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(run.to_yaml())
    (folder / "watched.py").write_text(WATCHED)
    program = [str(folder / "watched.py"), json.dumps({"folder": str(folder)} | watch)]
    launcher = TORCHRUN if ranks > 1 else [sys.executable]
    command = [*launcher, *program, "train", str(folder / "run.yaml"), *flags]
    environment = os.environ | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, start_new_session=True, env=environment, **pipes)


def finish(process, timeout_s=300):
    """What it said, on stdout and stderr; a process that hangs is killed with all that it has started."""
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def trained(folder, run, *flags, **how):
    """Train to the end; gives what was said."""
    process = start(folder, run, *flags, **how)
    out, error = finish(process)
    assert process.returncode == 0, error
    return out, error


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
    return [line.get("loss", line.get("eval_loss")) for line in lines]


@pytest.fixture
def make(make_run, sample, tmp_path):
    """Makes runs over 87 questions in steps of 43, 43 and 1, which is too few for two ranks; without dropout."""
    [one] = (sample / "test.jsonl").read_text().splitlines()[:1]
    (tmp_path / "one.jsonl").write_text(one + "\n")

    def make(name, val=None, train=None, **batch):
        questions = str(sample / "test.jsonl")
        data = {"train": questions, "val": str(val or questions), "test": [], "image_root": str(sample)}
        often = {"steps": 7, "eval_steps": 1, "save_steps": 2, "load_best_model_at_end": True}
        run = make_run(
            data=data,
            batch={"samples_per_step": 43} | batch,
            train=often | {"max_grad_norm": 0.5} | (train or {}),
            eval={"split": "test"},
            output=str(tmp_path / name),
        )
        Inputs.open(run).build()
        return run

    return make


@pytest.mark.parametrize(
    ("batch", "val", "way"),
    [
        ({"mode": "shared", "tokens_per_pack": 400}, None, ""),
        ({"mode": "separate", "samples_per_forward": 5}, "one.jsonl", ""),
        ({"mode": "shared", "tokens_per_pack": 600}, None, "fsdp"),
        ({"mode": "shared", "tokens_per_pack": 400}, None, "recorded"),
    ],
)
def test_two_ranks_do_what_one_does(make, tmp_path, batch, val, way):
    """By DDP; with weights that are spread over them; and with recorded passes, whose gradients they exchange alone."""
    fsdp, val = way == "fsdp", val and tmp_path / val
    one, two = make("one", val, **batch), make("two", val, {"fsdp": fsdp}, **batch)
    alone, together = tmp_path / "alone", tmp_path / "together"
    trained(alone, one, ranks=1)
    out, error = trained(together, two, recorded=way == "recorded")
    assert ("recorded" in error) == (way == "recorded")
    for step in range(7):
        names = [f"gradients-{step}-{rank}.safetensors" for rank in range(2)]
        assert_close(together / names[0], alone / names[0])
        assert_equal(together / names[0], together / names[1])
        assert len({(together / f"validation-{step + 1}-{rank}").read_text() for rank in range(2)}) == 1
    assert losses(two) == pytest.approx(losses(one), rel=TOLERANCE)
    assert_close(
        two.output / "adapter" / "adapter_model.safetensors", one.output / "adapter" / "adapter_model.safetensors"
    )
    assert_equal(together / "weights-0.safetensors", together / "weights-1.safetensors")
    assert [line.split()[1] for line in error.splitlines() if line.startswith("step ") and "grad" in line] == [
        f"{step}/7" for step in range(1, 8)
    ]
    assert out.count("7 steps") == 1
    held, of_all = (int((notes / "held-0").read_text()) for notes in (together, alone))
    assert held == of_all if not fsdp else held < 0.6 * of_all


@pytest.mark.skipif(
    'device.type != "cpu"' not in inspect.getsource(Trainer._load_optimizer_and_scheduler),
    reason="this transformers can not resume in several processes on a CPU (it asks torch for the device cpu:0)",
)
def test_ranks_stop_together_whichever_was_told_and_go_on_together(trainings, tmp_path):
    """The first time one rank gets a signal, the second time all processes and torchrun itself."""
    run = trainings.parts("shared")
    whole = run.model_copy(update={"output": tmp_path / "whole"})
    trained(tmp_path / "notes-whole", whole)
    notes = tmp_path / "notes"

    process = start(notes, run, signal=[5, 1])
    _, error = finish(process)
    assert process.returncode != 0
    assert error.count("Error: stopped by SIGUSR1 after step 6 of 24, which is saved") == 1
    assert "Traceback" not in error.partition("Error: stopped")[0]

    process = start(notes, run, "--resume", sleep=0.1)
    wait_for(lambda: (run.output / "log.jsonl").read_text().count("\n") >= 12, process)
    os.killpg(process.pid, signal.SIGTERM)
    _, error = finish(process)
    assert process.returncode != 0
    [step] = re.findall(r"Error: stopped by SIGTERM after step (\d+) of 24, which is saved", error)
    assert trainings.checkpoints(run)[-1] == int(step) >= 9

    out, error = trained(notes, run, "--resume")
    assert error.count(f"going on from checkpoint-{step}\n") == 1
    trainings.assert_same_adapter(run, whole)
    assert trainings.log(run) == trainings.log(whole)


def wait_for(condition, process, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_rank_ends_all(trainings, tmp_path, rank):
    process = start(tmp_path / "notes", trainings.parts("shared"), fail=[5, rank])
    _, error = finish(process, timeout_s=60)
    assert process.returncode != 0
    who = f"rank {rank}: " if rank else ""
    assert f"Error: {who}unexpected RuntimeError: this rank has failed" in error


def test_what_is_refused_is_told_once(trainings, tmp_path):
    process = start(tmp_path / "notes", trainings.whole("shared"), "--set", "train.learning_rate=1")
    _, error = finish(process)
    assert process.returncode != 0
    assert error.count("holds another run") == 1 and "rank 1: " not in error


def test_the_first_rank_evaluates_when_the_others_have_gone(make_run, tmp_path):
    run = make_run(train={"steps": 2})
    Inputs.open(run).build()
    out, error = trained(tmp_path / "notes", run, waits_for_others=True)
    assert "exact match" in out


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus_two_ranks_are_no_further_from_one_than_rounding_is(make, tmp_path):
    """By NCCL, compiled, with FlexAttention; the yardstick is how far bfloat16 is from float32."""
    kinds = {
        "exact": (1, {"precision": "fp32", "compile": False}),
        "one": (1, {"precision": "bf16"}),
        "two": (2, {"precision": "bf16"}),
        "sharded": (2, {"precision": "bf16", "fsdp": True}),
    }
    no_validation = {"steps": 1, "save_steps": 1, "load_best_model_at_end": False, "tf32": False}
    begun = {}
    for name, (ranks, train) in kinds.items():
        run = make(name, train=no_validation | train, mode="shared", tokens_per_pack=1024)
        run = run.model_copy(update={"data": run.data.model_copy(update={"val": []})})
        begun[name] = start(tmp_path / f"notes-{name}", run, ranks=ranks, on_gpu=True)
    gradients = {}
    for name, process in begun.items():
        _, error = finish(process)
        assert process.returncode == 0, error
        weights = load_file(tmp_path / f"notes-{name}" / "gradients-0-0.safetensors")
        gradients[name] = torch.cat([weights[key].flatten().double() for key in sorted(weights)]).cpu()
    rounding = (gradients["one"] - gradients["exact"]).norm()
    for name in ("two", "sharded"):
        assert 0 < (gradients[name] - gradients["one"]).norm() <= rounding, name
