"""Trainings to interrupt and compare, models with random LoRA weights, and single optimizer steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import image_size
from lookonce.datasets.records import Record, Turn, read_records
from lookonce.run.config import RunFile
from lookonce.run.open import OpenRun
from lookonce.run.sections import BatchSection, LoraSection
from lookonce.selftest.model import ieee_float32
from lookonce.train.data.batches import IGNORED, Batch
from lookonce.train.data.tokenize import to_messages
from lookonce.train.loop.log_files import MetricsLog
from lookonce.train.model import compile
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.load import add_lora, load_without_tower
from lookonce.train.model.loss import forward_loss
from lookonce.workflow import train
from support.batches import BatchMaker

COMPILED_ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # the compiler warns
]
"""The marks of tests that compile on a GPU."""
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install 'lookonce[qlora]'"
)


def compile_layers_by(monkeypatch: pytest.MonkeyPatch, backend: Any, **options: Any) -> None:
    """Compile layers by a backend of torch.compile that is faster than Inductor, with `options` in place of others."""

    def compiled_call(dynamic: bool | None) -> Any:
        return torch.compile(torch.nn.Module._call_impl, **{"dynamic": dynamic, "backend": backend, **options})

    monkeypatch.setattr(compile, "compiled_call", compiled_call)


def compile_anew_by(monkeypatch: pytest.MonkeyPatch, backend: str) -> list[Any]:
    """Compile everything anew by a backend of torch.compile; returns a list of the functions that are given to it."""
    given, torch_compile = list[Any](), torch.compile

    def compiled(function: Any, **options: Any) -> Any:
        given.append(function)
        return torch_compile(function, **options | {"backend": backend})

    monkeypatch.setattr(torch, "compile", compiled)
    for cached in (compile.compiled_call, compile._compiled_apart):
        monkeypatch.setattr(compile, cached.__name__, cache(cached.__wrapped__))
    torch._dynamo.reset()
    return given


MAX_TOKENS = 1500
CPU = torch.device("cpu")
SIZES = {"min_pixels": 1, "max_pixels": 120_000}
"""So that images have grids of several sizes, of more than one window of the tower."""
QUIET: dict[str, Any] = {"notify": lambda note: None}
Step = tuple[float, dict[str, torch.Tensor]]
"""Loss and gradients."""


@dataclass
class Trainings:
    """Trainings of a little over two epochs, with several forward passes a step.

    They have dropout, which draws from the random state, so a resumed training must restore that state too.
    """

    make_run: Callable[..., RunFile]
    sample: Path
    caches: Path
    """Holds the cache of all trainings, that of the sample. Tests must not write to it."""
    folder: Path
    """Holds the uninterrupted trainings."""
    finished: dict[str, RunFile]
    """Uninterrupted trainings by their options; each is trained once a session."""

    num_steps, steps_an_epoch, num_validated = 24, 11, 12

    def options(self, mode: str, **train: Any) -> dict[str, Any]:
        questions, few = self.sample / "test.jsonl", self.folder / "few.jsonl"
        few.write_text("".join(questions.read_text().splitlines(keepends=True)[: self.num_validated]))
        return {
            "data": {"train": str(questions), "val": str(few), "test": [], "image_root": str(self.sample)},
            "cache": {"dir": str(self.caches)},
            "batch": {"mode": mode, "samples_per_forward": 3, "tokens_per_pack": 400},
            "train": {"steps": self.num_steps, "save_steps": 4, "eval_steps": 3} | train,
            "lora": {"dropout": 0.1},
            "eval": {"split": "val"},
        }

    def uninterrupted(self, mode: str, **train_options: Any) -> RunFile:
        """A run that was trained without interruption."""
        name = f"{mode} {train_options}"
        if name not in self.finished:
            output = str(self.folder / str(len(self.finished)))
            self.finished[name] = run = self.make_run(output=output, **self.options(mode, **train_options))
            train(run, notify=lambda note: None)
        return self.finished[name]

    def unstarted(self, mode: str, **train_options: Any) -> RunFile:
        """A run with the same options, in the test's own folder."""
        return self.make_run(**self.options(mode, **train_options))

    @staticmethod
    def adapter(run: RunFile) -> dict[str, torch.Tensor]:
        return load_file(run.output / "adapter" / "adapter_model.safetensors")

    def assert_same_adapter(self, run: RunFile, other: RunFile) -> None:
        found, expected = self.adapter(run), self.adapter(other)
        assert found.keys() == expected.keys()
        assert all((found[name] == weight).all() for name, weight in expected.items())

    @staticmethod
    def log(run: RunFile) -> list[list[Any]]:
        """The lines of log.jsonl, without the times."""
        lines = [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
        return [[line.get(name) for name in ("step", "epoch", "loss", "eval_loss", "grad_norm")] for line in lines]

    @staticmethod
    def checkpoints(run: RunFile) -> list[int]:
        return sorted(int(path.name.rpartition("-")[2]) for path in (run.output / "checkpoints").glob("checkpoint-*"))


class InterruptedLines(MetricsLog):
    """Interrupts the training after a step, as a cluster that ends the job."""

    last_step: int

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == self.last_step:
            raise KeyboardInterrupt


def train_until(run: RunFile, step: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Train a run, and interrupt it after a step."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lookonce.train.train.MetricsLog", type("Lines", (InterruptedLines,), {"last_step": step}))
        train(run, **QUIET, **options)


@pytest.fixture(scope="session")
def finished_trainings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, RunFile]]:
    return tmp_path_factory.mktemp("finished"), {}


@pytest.fixture
def trainings(
    make_run: Callable[..., RunFile],
    sample: Path,
    built: VisionCache,
    finished_trainings: tuple[Path, dict[str, RunFile]],
) -> Trainings:
    return Trainings(make_run, sample, built.folder.parent, *finished_trainings)


@pytest.fixture(scope="session")
def random_lora() -> Callable[..., Any]:
    """Loads a run's model with an adapter whose B matrices are random.

    They start at zero, so the adapter would have no effect and the gradients of A would be zero.
    """

    def make(inputs: OpenRun, load: Callable[..., Any] = load_without_tower, dtype: torch.dtype = torch.float32) -> Any:
        model = add_lora(load(inputs.model_folder, dtype), inputs.model_folder, inputs.run.lora, seed=1)
        draw_lora_b(model, seed=2)
        return model

    return make


def with_random_lora(model_folder: ModelFolder, dropout: float = LoraSection().dropout) -> Any:
    """A model in float32 without its tower, with an adapter that has an effect."""
    options = LoraSection(dropout=dropout)
    model = add_lora(load_without_tower(model_folder, torch.float32), model_folder, options, seed=0)
    draw_lora_b(model, seed=0)
    return model


def draw_lora_b(model: Any, seed: int) -> None:
    """Draw the B matrices of the adapter, also those that there are."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            drawn = torch.empty_like(parameter, device="cpu").normal_(0, 0.1, generator=generator)
            parameter.data.copy_(drawn)  # to where quantised weights are loaded


@pytest.fixture(scope="module")
def exact_float32() -> Iterator[None]:
    """Multiplies float32 matrices without TensorFloat-32, which an earlier training may have allowed."""
    with ieee_float32():
        yield


def records(sample: Path) -> list[Record]:
    """Images of four sizes with several questions, two images, several turns, a system text, and no image."""
    found = read_records(sample / "train.jsonl")
    images = list({image_size(record.images[0].read_bytes()): record.images for record in found}.values())[:4]
    turns = [record.turns[0] for record in found[:8]]
    return [
        *(Record(shown, (turn,)) for number, shown in enumerate(images) for turn in turns[: 2 + number]),
        *(Record((*images[1], *images[0]), (turn,)) for turn in turns[:2]),
        *(Record(images[0], (turns[3], turn), system="Answer briefly.") for turn in turns[4:6]),
        Record((), (Turn("Is there text?", "no"),)),
    ]


def stock_logits_and_labels(model: Any, processor: Any, session: OpenRun, sizes: dict[str, int] = SIZES) -> Any:
    """By transformers' own code: processor, padding, tower and full logits, with the labels shifted to them."""
    shown = session.records["train"]
    processor.image_processor.size = {"shortest_edge": sizes["min_pixels"], "longest_edge": sizes["max_pixels"]}
    texts = [processor.apply_chat_template(to_messages(record), tokenize=False) for record in shown]
    images = [Image.open(path).convert("RGB") for record in shown for path in record.images]
    batch = processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
    labels = torch.full_like(batch["input_ids"], IGNORED)
    for row, example in enumerate(session.examples("train")[0]):
        ids, flags = example.expanded(session.chat_tokenizer.image_token_id)
        assert batch["input_ids"][row, : len(ids)].tolist() == ids.tolist()
        labels[row, : len(ids)] = torch.from_numpy(ids).long().masked_fill(~torch.from_numpy(flags), IGNORED)
    return model(**batch, use_cache=False).logits[:, :-1], labels[:, 1:]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def batches(session: OpenRun, mode: str, device: torch.device = CPU, **options: Any) -> list[Batch]:
    """Those of one step with all examples."""
    maker = batch_maker(session, mode, device, **options)
    [micro_batches] = maker.sampler.epoch(0)
    return [maker.batch(micro_batch) for micro_batch in micro_batches]


def batch_maker(session: OpenRun, mode: str, device: torch.device = CPU, **options: Any) -> BatchMaker:
    """What makes them."""
    examples, _ = session.examples("train")
    sizes = {"samples_per_step": 1000, "samples_per_forward": 5, "tokens_per_pack": MAX_TOKENS} | options
    batch = BatchSection.model_validate({"mode": mode} | sizes)
    return BatchMaker.of(examples, session.chat_tokenizer, session.features, batch, device, seed=3)


def step(model: Any, batches: list[Batch]) -> Step:
    """One step with some batches."""
    mask, total = PackMask(MAX_TOKENS, CPU), 0.0
    model.zero_grad()
    with training_on_packs(model, compiled=False):
        for batch in batches:
            loss = forward_loss(model, batch, mask)
            loss.backward()
            total += loss.item()
    return total, gradients(model)


def assert_same(found: Step, expected: Step) -> None:
    """Check loss and gradients, of which none is zero."""
    assert abs(found[0] - expected[0]) < 1e-5 * abs(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        assert (found[1][name] - gradient).norm() < 1e-5 * gradient.norm(), name


def difference(found: Step, expected: Step) -> float:
    """The largest relative difference of the loss and of any gradient."""
    assert found[1].keys() == expected[1].keys()
    each = [((found[1][name] - gradient).norm() / gradient.norm()).item() for name, gradient in expected[1].items()]
    return max(abs(found[0] / expected[0] - 1), *each)


@contextmanager
def in_float64() -> Iterator[None]:
    """The stock code says float32 in places; here that means float64."""
    before = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32, torch.float, torch.Tensor.float = torch.float64, torch.float64, torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = before[:3]
        torch.set_default_dtype(before[3])
