"""Measure reinforcement learning: `lookonce train` with `train.objective: grpo`, packs without sharing, and TRL.

    python benchmarks/grpo.py --model 2b --tokenizer Qwen3-VL-tokenizer --tokens 8 64
    python benchmarks/grpo.py --model 8b --tokenizer Qwen3-VL-tokenizer --variants shared trl --questions 18 --rows 4

shared     one pass over each image, for all questions about it and all answers to them, from the cache
packed     the same answers and loss, but each answer is trained, and each question answered, with its own copy of the
           image: packs from the cache without padding, the most that a trainer without trees over images can do
trl        TRL's GRPOTrainer with transformers' generation: a padded row per answer, the tower in each pass. Its frames
           are decoded in front of the training, since it would decode all frames of a step again for each of its passes

All have the same weights, LoRA, frames of Kvasir-VQA's sizes, nine questions about each in the same order, `--samples`
answers to each question, and answers of `--tokens` tokens: random weights seldom end one before, and TRL is told not
to. Rewards are made of the tokens of an answer, so they differ and cost nothing. The first step of all variants has the
answers of the first one, so that log-probabilities and the gradient's norm can be compared; it is not timed.

Each variant is a process of its own. Frames have different sizes, so steps differ by a factor of two, and each variant
times different steps. So seconds are those of a mean step: those of the steps that are timed, divided by the products
that the variant computes in them, times those of a mean step. Training includes the optimizer. The limit is what these
matrix products of a mean step, without the tower's, take at the rate of large ones: forward and backward over what is
trained, and forward over what is sampled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image

from lookonce.bench.step import make_run, matmul_flops_per_second, num_flops, synchronize
from lookonce.datasets.records import Record
from lookonce.environment import best_device, device_name
from lookonce.eval.answers.policy import Policy
from lookonce.run.open import TO_BUILD, TO_MEASURE, open_run
from lookonce.run.startup import Startup
from lookonce.train.data.packing import Group, group_examples, nested
from lookonce.train.data.policy import Drawn, QuestionStream, answered
from lookonce.train.data.sampler import Sampler
from lookonce.train.data.tokenize import Example, to_messages
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.rewards import RewardTrainer
from lookonce.train.loop.session import make_trainer
from lookonce.train.model.load import PRECISIONS, add_lora, load_with_tower, load_without_tower

STEPS, MIN_SECONDS = {"shared": (3, 10), "packed": (2, 4), "trl": (1, 2)}, 8.0
"""Steps that are not timed, as ours capture passes over new shapes, and the least that are, unless time is over."""
PER_IMAGE = 9
"""Questions about each image; images with fewer are left out."""
HEADER = (
    "variant | | s/step | sampling | rewarding | training | limit | s/image | ms/answer | tokens trained | sampled | "
    "peak GB | before, s | first gradient's norm | log-probabilities differ: mean, most"
)


def reward_of(token_ids: Sequence[int]) -> float:
    """From 0 to 1, of all tokens of an answer."""
    return zlib.crc32(np.array(token_ids, np.int32).tobytes()) / 2**32


class Clock(transformers.TrainerCallback):
    """Times the steps of a trainer, stops it, and prints what each step took."""

    def __init__(self, variant: str, seconds: float) -> None:
        self.began, self.ends, self.logs = time.perf_counter(), list[float](), list[dict[str, float]]()
        (self._first, self._least), self._limit = STEPS[variant], self.began + seconds

    @property
    def steps(self) -> list[float]:
        """Seconds of each step that is timed; the first one has no beginning."""
        return np.diff(self.ends)[self._first - 1 :].tolist()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(best_device())
        self.ends.append(time.perf_counter())
        is_enough = len(self.steps) >= self._least and sum(self.steps) >= MIN_SECONDS
        control.should_training_stop = is_enough or self.ends[-1] > self._limit

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.logs.append(dict(logs))
            print(
                f"  step {state.global_step} at {self.ends[-1] - self.began:.3f} s: {logs}", file=sys.stderr, flush=True
            )


class HashedRewards(Policy):
    """Draws answers as `lookonce train` does, and rewards them by `reward_of`; the first ones may be given."""

    first: Sequence[Sequence[Sequence[int]]] = ()

    def __call__(self, model: Any, asked: Sequence[tuple[int, Example]], seed: int) -> list[list[Drawn]]:
        drawn, given = super().__call__(model, asked, seed), self.first
        return [[Drawn(tuple(ids), reward_of(ids)) for ids in group] for group in given] if given else drawn

    def _rewarded(self, number: int, prompt: Example, group: Any) -> list[Drawn]:
        image = self._opened.chat_tokenizer.image_token_id  # with it an answer would be left out, and TRL would fail
        rewarded = super()._rewarded(number, prompt, group)
        answers = [(one, tuple(0 if token == image else token for token in one.token_ids)) for one in rewarded]
        return [one._replace(token_ids=ids, reward=reward_of(ids), is_cut=False) for one, ids in answers]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")


def alone(examples: Sequence[Example], image_token_id: int) -> list[Group]:
    """Each example as a group of its own, as in `batch.mode: packed`."""
    groups = [group_examples([example], image_token_id)[0] for example in examples]
    return [replace(group, examples=(number,)) for number, group in enumerate(groups)]


class Cell:
    """One variant with answers of one length."""

    def __init__(self, variant: str, num_tokens: int, options: argparse.Namespace) -> None:
        self.variant, self.num_tokens, self.options = variant, num_tokens, options
        settings = ["train.objective=grpo", "train.logging_steps=1"]
        settings += [f"train.precision={'bf16' if torch.cuda.is_available() else 'fp32'}", "grpo.filter=false"]
        settings += [f"batch.samples_per_step={options.questions}", f"grpo.samples={options.samples}"]
        settings += [f"grpo.max_new_tokens={num_tokens}", *options.assignments]
        run = self.run = make_run(options.place, options.model, options.images, options.tokenizer, settings)
        open_run(run, TO_BUILD).build()
        self.opened = open_run(run, TO_MEASURE)
        self.dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        self.image_token_id: int = self.opened.chat_tokenizer.image_token_id
        asked, prompts, _ = self.opened.questions("train")
        groups = [group.examples for group in group_examples(prompts, self.image_token_id)]
        kept = [n for group in groups for n in group[:PER_IMAGE] if len(group) >= PER_IMAGE]
        self.questions, self.prompts = [asked[n] for n in kept], [prompts[n] for n in kept]
        plan = Sampler.of(self.prompts, self.image_token_id, run.batch, run.train.seed)
        self.stream = QuestionStream(self.prompts, plan)
        self.order = [self.stream.at(position)[0] for position in range(len(self.prompts))]
        """The numbers of the questions as they are asked."""
        self.path: Path = options.place / f"first-{options.model}-{options.questions}-{num_tokens}.json"
        """The answers of the first step and their log-probabilities, by the variant that was measured first."""
        self.first = json.loads(self.path.read_text()) if self.path.exists() else None
        self.log_probs: dict[tuple[int, ...], list[float]] = {}
        """Those of the tokens of each answer of the first step."""

    def measure(self) -> dict[str, Any]:
        """Train, and say what it took."""
        options, clock = self.options, Clock(self.variant, self.options.seconds)
        with self.opened, tempfile.TemporaryDirectory() as folder:
            model = (self.trl if self.variant == "trl" else self.ours)(clock, Path(folder))
            timed = clock.logs[-len(clock.steps) :] if clock.steps else []
            share = self.share(model, range(STEPS[self.variant][0], len(clock.ends)))
            return {
                "variant": self.variant,
                "tokens": self.num_tokens,
                "device": f"{device_name()}, torch {torch.__version__}, transformers {transformers.__version__}",
                "steps": clock.steps,
                "share": share,
                "step": _mean(clock.steps) / share,
                "sampling": _mean([log["sampling_seconds"] for log in timed]) / share,
                "rewarding": _mean([log.get("rewarding_seconds", 0.0) for log in timed]) / share,
                "answers": options.questions * options.samples,
                "images": options.questions / PER_IMAGE,
                "before": clock.ends[0] - clock.began,
                "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
                "grad_norm": float(clock.logs[0]["grad_norm"]),
                "differ": self.compared() if self.first else [],
                **self.limits(model),
            }

    def share(self, model: Any, steps: Sequence[int]) -> float:
        """The products of some steps, by their numbers from 0 on, as a share of those of mean ones."""
        num = self.options.questions
        asked = [[self.stream.at(step * num + place)[1] for place in range(num)] for step in steps]
        return _mean([self._work(model, prompts)[2] for prompts in asked]) / self._mean_work(model)[2]

    def limits(self, model: Any) -> dict[str, Any]:
        """Tokens that are trained and sampled in a mean step, and seconds of its products."""
        rate = matmul_flops_per_second(best_device(), self.dtype)
        trained, sampled, flops = self._mean_work(model)
        return {"trained": round(trained), "sampled": round(sampled), "limit": flops / rate, "tflops": rate / 1e12}

    def _mean_work(self, model: Any) -> list[float]:
        """What `_work` says of an epoch, for as many questions as a step has."""
        of_epoch = self._work(model, [self.prompts[number] for number in self.order])
        return [value * self.options.questions / len(self.order) for value in of_epoch]

    def _work(self, model: Any, prompts: Sequence[Example]) -> tuple[float, float, float]:
        """Tokens that are trained and sampled with these questions, and floating-point operations."""
        ids = np.random.default_rng(0).integers(0, 1000, (len(prompts), self.options.samples, self.num_tokens))
        ids += ids >= self.image_token_id  # which would make another group
        flat = [answered(prompt, each) for prompt, group in zip(prompts, ids, strict=True) for each in group]
        rows, groups, size = alone(flat, self.image_token_id), group_examples(flat, self.image_token_id), len(ids[0])
        tree = [nested(group, flat) for group in groups]
        parts = [(group, range(n, n + size)) for group in groups for n in range(0, len(group.examples), size)]
        by_question = [nested(group.subset(part), flat) for group, part in parts]
        trained, sampled = {"shared": (tree, tree), "packed": (rows, by_question), "trl": (rows, rows)}[self.variant]
        tokens = [sum(group.num_tokens for group in part) for part in (trained, sampled)]
        return (*tokens, num_flops(model, trained, flat) + num_flops(model, sampled, flat) / 2)

    def compared(self) -> list[float]:
        """The mean and the largest distance to the log-probabilities of the first variant."""
        ids = [tuple(answer) for group in self.first["answers"] for answer in set(map(tuple, group))]
        kept = dict(zip(map(tuple, self.first["ids"]), self.first["log_probs"], strict=True))
        once = [np.subtract(self.log_probs[each], kept[each]) for each in ids if ids.count(each) == 1]
        distances = np.abs(np.concatenate(once))
        return [float(distances.mean()), float(distances.max())]

    def ours(self, clock: Clock, folder: Path) -> Any:
        """The training of `lookonce train`; returns the model."""
        run, log_probs, note = self.run, self.log_probs, RewardTrainer._note_passes
        model = load_without_tower(self.opened.model_folder, PRECISIONS[run.train.precision], run.model.attention)
        model = add_lora(model, self.opened.model_folder, run.lora, run.train.seed)
        settings = training_arguments(run, folder, max_steps=100_000, save_strategy="no", eval_strategy="no")
        draw = HashedRewards(self.opened, self.questions)
        draw.first = self.first["answers"] if self.first else ()

        def noted(trainer: Any, computed: Any) -> None:
            """Keep what the first step has computed."""
            note(trainer, computed)
            for indices, values in () if trainer.state.global_step else computed:
                answers = [trainer.step.answers[number] for number in indices]
                ends = np.cumsum([len(answer.old) for answer in answers])
                for answer, part in zip(answers, np.split(values[0].float().cpu().numpy(), ends[:-1]), strict=True):
                    log_probs[tuple(answer.example.token_ids[-len(part) :].tolist())] = part.tolist()
            draw.first = ()
            if not self.first and not trainer.state.global_step:
                groups = [[answer.token_ids for answer in group] for group in trainer._kept[1]]
                kept = {"answers": groups, "ids": [*log_probs], "log_probs": [*log_probs.values()]}
                self.path.write_text(json.dumps(kept))

        with ExitStack() as within:
            within.enter_context(mock.patch.object(RewardTrainer, "_note_passes", noted))
            for module in ("train.data.policy", "eval.decoding.batches") if self.variant == "packed" else ():
                within.enter_context(mock.patch(f"lookonce.{module}.group_examples", alone))
            more: Any = (), [clock], Startup(lambda text: print(f"  {text}", file=sys.stderr, flush=True))
            make_trainer(self.opened, model, settings, self.prompts, *more, draw=draw).train()
        return model

    def trl(self, clock: Clock, folder: Path) -> Any:
        """The same by TRL's `GRPOTrainer`, of a model with the same LoRA weights; returns the model."""
        import datasets
        from trl import GRPOConfig, GRPOTrainer

        run, options, log_probs = self.run, self.options, self.log_probs
        given = [ids for group in self.first["answers"] for ids in group] if self.first else []
        decoded = {path: Image.open(path).convert("RGB") for record, _ in self.questions for path in record.images}

        class Timed(GRPOTrainer):  # type: ignore[misc]
            """Has the given answers in its first step, and keeps their log-probabilities."""

            sampling_seconds = 0.0
            """Since the last step that was logged."""

            def _generate_and_score_completions(self, inputs: Any) -> Any:
                began = time.perf_counter()
                found = super()._generate_and_score_completions(inputs)
                synchronize(best_device())
                self.sampling_seconds += time.perf_counter() - began
                return found

            def _generate_single_turn(self, prompt_ids: Any, *args: Any, **others: Any) -> Any:
                if not given or self.state.global_step:
                    return super()._generate_single_turn(prompt_ids, *args, **others)
                return [given.pop(0) for _ in prompt_ids], None

            def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Any, *args: Any, **others: Any) -> Any:
                found = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **others)
                if self.state.global_step == 0:
                    rows = input_ids[:, -found[0].shape[1] :].tolist(), found[0].detach().float().tolist()
                    log_probs.update((tuple(ids), values) for ids, values in zip(*rows, strict=True))
                return found

            def log(self, logs: dict[str, float], *args: Any) -> None:
                super().log(logs | {"sampling_seconds": self.sampling_seconds}, *args)
                self.sampling_seconds = 0.0

        on_gpu, num_answers = torch.cuda.is_available(), options.questions * options.samples
        on_device: Any = {"bf16": on_gpu, "use_cpu": not on_gpu}
        config = GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=num_answers // options.rows,
            generation_batch_size=min(options.generated, num_answers),
            num_generations=options.samples,
            max_completion_length=self.num_tokens,
            generation_kwargs={"min_new_tokens": self.num_tokens, "suppress_tokens": [self.image_token_id]},
            shuffle_dataset=False,
            epsilon_high=run.grpo.clip[1],
            gradient_checkpointing=False,
            **on_device,
            **{"max_steps": 100_000, "logging_steps": 1, "save_strategy": "no", "report_to": "none"},
        )
        dataset = datasets.Dataset.from_list([self._row(*self.questions[number]) for number in self.order])
        dataset.set_transform(
            lambda rows: rows | {"images": [[decoded[Path(path)] for path in paths] for paths in rows["images"]]}
        )
        model = load_with_tower(self.opened.model_folder, PRECISIONS[run.train.precision], run.model.attention)
        model = add_lora(model, self.opened.model_folder, run.lora, run.train.seed)

        def reward(completion_ids: Any, **others: Any) -> list[float]:
            return [reward_of(ids) for ids in completion_ids]

        trainer = Timed(model, reward, config, dataset, processing_class=self._processor(), callbacks=[clock])
        trainer.train()
        return model

    def _row(self, record: Record, turn: int) -> dict[str, Any]:
        question = [part["text"] for part in to_messages(record)[2 * turn]["content"] if part["type"] == "text"]
        return {"prompt": [{"role": "user", "content": question[0]}], "images": [str(path) for path in record.images]}

    def _processor(self) -> Any:
        """transformers' own, without the part for videos, which needs files that a model of random weights lacks."""
        transformers.ProcessorMixin.check_argument_for_proper_class = lambda self, name, value: type(value)
        folder = self.opened.model_folder.folder
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        images = transformers.AutoImageProcessor.from_pretrained(folder)
        kind = json.loads((folder / "preprocessor_config.json").read_text())["processor_class"]
        return getattr(transformers, kind)(images, tokenizer, None, chat_template=tokenizer.chat_template)


def report(measured: Sequence[dict[str, Any]]) -> str:
    """A table of Markdown; `measured` has at least one variant."""
    lines = [HEADER, "|".join(["---"] * (HEADER.count("|") + 1))]
    for found in measured:
        first, step = next(each for each in measured if each["tokens"] == found["tokens"]), found["step"]
        parts = found["sampling"], found["rewarding"], step - found["sampling"] - found["rewarding"]
        seconds = (step, *parts, found["limit"], step / found["images"])
        cells = (
            f"{found['variant']}, {found['answers']} answers of {found['tokens']} tokens | {step / first['step']:.1f}x",
            *(f"{each:.3f}" for each in (*seconds, 1e3 * step / found["answers"])),
            f"{found['trained']:,} | {found['sampled']:,} | {found['peak_gb']:.1f} | {found['before']:.0f}",
            f"{found['grad_norm']:.5g} | {', '.join(f'{distance:.1e}' for distance in found['differ'])}",
        )
        lines.append(" | ".join(cells))
    device = f"{measured[-1]['device']}, {measured[-1]['tflops']:.0f} TFLOP/s in large products"
    return "\n".join([*(f"| {line} |" for line in lines), "", device])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="2b")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--place", type=Path, default=Path("bench"))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--variants", nargs="+", choices=[*STEPS], default=[*STEPS])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8], help="of each answer")
    parser.add_argument("--questions", type=int, default=72, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers to each question")
    parser.add_argument("--rows", type=int, default=8, help="of a forward and backward pass of TRL")
    parser.add_argument("--generated", type=int, default=288, help="answers that TRL generates at once")
    parser.add_argument("--seconds", type=float, default=120, help="after which no further step of a variant begins")
    parser.add_argument("--set", action="append", default=[], dest="assignments", help="a key of the run file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return print(json.dumps(Cell(options.worker, options.tokens[0], options).measure()))
    measured: list[dict[str, Any]] = []
    for path in options.place.glob(f"first-{options.model}-*.json"):
        path.unlink()
    for tokens, variant in itertools.product(options.tokens, options.variants):
        print(f"{variant}, {tokens} tokens", file=sys.stderr, flush=True)
        worker = ["--tokens", str(tokens), "--worker", variant]
        ended = subprocess.run([sys.executable, __file__, *sys.argv[1:], *worker], stdout=subprocess.PIPE, text=True)
        if ended.returncode:
            print(f"{variant}, {tokens} tokens: ended with {ended.returncode}", flush=True)
        else:
            measured.append(json.loads(ended.stdout.splitlines()[-1]))
            print(json.dumps(measured[-1]), report(measured), sep="\n", flush=True)


if __name__ == "__main__":
    main()
