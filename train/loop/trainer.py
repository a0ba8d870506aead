"""transformers' Trainer, set up from the run file, and what is measured while training.

Trainer keeps the loop, optimizer, scheduler, mixed precision, checkpoints and resuming. To it, one item of data is a
whole optimizer step, so a step has exactly `samples_per_step` samples in any number of forward passes. A step follows
from the seed and its number alone, so batches are prefetched across epochs.

Trainer decides when the validation loss is due, and the callback `Evaluations` when answers are. Both are measured in
Trainer's evaluation, which comes before a checkpoint that is due at the same step, so a resumed training lacks no
measurement. Answering changes neither the weights nor the random state.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from lookonce.errors import TrainingError, UsageError
from lookonce.run.config import RunFile
from lookonce.run.folder import step_of
from lookonce.run.sections import Checkpointing
from lookonce.run.startup import Startup
from lookonce.text import quiet
from lookonce.train.data.batches import Batch, Prefetcher
from lookonce.train.data.dataset import DataCollatorForPacks, PackBatchSampler, PackIndices, VQADataset
from lookonce.train.data.sampler import MicroBatch
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.checkpoints import LOSSES, check_undamaged, checkpoint_bytes, delete_old, numbers_only, saving
from lookonce.train.loop.first_pack import FirstPack, first_pack_of
from lookonce.train.loop.warmup import WarmUp
from lookonce.train.model.compile import CompileCache, checkpointed
from lookonce.train.model.gpu_memory import out_of_memory
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import broadcast_trained, is_sharded, text_model
from lookonce.train.model.loss import RewardLoss
from lookonce.train.model.packs import PackPasses, average_gradients, pack_loss, packed_attention, share_of_loss

Answer = Callable[[Any], dict[str, float]]
"""Lets a model answer this rank's share of the questions; returns what all ranks' answers score, by name."""


class Evaluations(TrainerCallback):
    """Asks Trainer for an evaluation when answers are due, says what it measures, and ends a training that gets no
    better.

    It must come before callbacks that stop a training, because what is due is measured first. The log in Trainer's
    state has all measurements so far, on every rank and in every checkpoint, so a training that was resumed ends where
    it would have ended.
    """

    def __init__(
        self,
        every: int | Literal["epoch"] | None = None,
        answer: Answer | None = None,
        patience: int | None = None,
        measure: str = "loss",
    ) -> None:
        """Answers are due after `every` epoch or number of steps, and after the last step.

        The training ends after `patience` measurements of `measure`, a name in the log, without a better one.
        """
        self._every, self._answer, self._patience, self._measure = every, answer, patience, measure
        self._first_step = 0
        self.ended_early = ""
        """Why the training ends before its last step, other than by `patience`."""
        self.validates, self.answers = True, False
        """What the next evaluation measures: the validation loss, and the score of answers."""

    def why_over(self, state: Any) -> str:
        """Why a training ends before its last step; empty if it does not."""
        if self.ended_early:
            return self.ended_early
        best, best_step, num_worse = None, 0, 0
        for line in state.log_history if self._patience else ():
            if (value := line.get(f"eval_{self._measure}")) is not None:
                is_better = best is None or (value < best if self._measure == "loss" else value > best)
                num_worse = 0 if is_better else num_worse + 1
                best, best_step = (value, line["step"]) if is_better else (best, best_step)
        if not self._patience or num_worse < self._patience or state.global_step >= state.max_steps:
            return ""
        return (
            f"ended after step {state.global_step:,} of {state.max_steps:,} (train.patience): "
            f"{'1 measurement was' if num_worse == 1 else f'{num_worse:,} measurements in a row were'} no better than "
            f"that after step {best_step:,}"
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._first_step = state.global_step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or bool(self.why_over(state))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(control, self._answer is not None and self._is_due(state))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        has_ended = state.epoch.is_integer() and state.global_step > self._first_step
        if not has_ended and self.why_over(state):  # else what was measured and saved would be so twice
            control.should_evaluate = control.should_save = False
        self._note(control, False)  # the epoch's last step has ended before

    def _is_due(self, state: Any) -> bool:
        if state.global_step >= state.max_steps:
            return True
        return bool(state.epoch.is_integer() if self._every == "epoch" else state.global_step % self._every == 0)

    def _note(self, control: Any, answers: bool) -> None:
        self.validates, self.answers = control.should_evaluate, answers
        control.should_evaluate = control.should_evaluate or answers

    def score(self, model: Any) -> dict[str, float]:
        """What a model's answers score, over all ranks, as it is logged."""
        assert self._answer
        began = time.perf_counter()
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            scored = self._answer(model)
        seconds = round(time.perf_counter() - began, 3)
        return {f"eval_{name}": value for name, value in scored.items()} | {"eval_seconds": seconds}


def _check_arguments(args: TrainingArguments, sampler: PackBatchSampler) -> None:
    if args.gradient_accumulation_steps > 1:
        raise UsageError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, but a step of packs has as many "
            "passes as it needs; leave it out and set PackBatchSampler(dataset, samples_per_step=...)"
        )
    if sampler.plan.num_ranks != args.world_size:
        raise UsageError(
            f"the packs are for {sampler.plan.num_ranks} of {args.world_size} processes that train together; start "
            "them with torchrun or accelerate launch, and leave rank and num_ranks of PackBatchSampler out"
        )
    if args.n_gpu > 1:
        args._n_gpu = 1  # else Trainer uses DataParallel, which splits batches; features have no batch dimension


def check_can_answer(run: RunFile, num_ranks: int) -> None:
    """Check that a training can answer if it is asked to; raises UsageError if no rank has all of its weights."""
    if run.eval.every and run.train.fsdp and num_ranks > 1:
        raise UsageError(
            "eval.every cannot answer questions with weights that train.fsdp shards over several ranks; set "
            "train.fsdp: false if the model fits on one GPU, or eval.every: null and run after training: lookonce eval "
            f"{run.output}"
        )


def num_tokens(step: Sequence[PackIndices]) -> int:
    """The tokens of the packs of a step, without fillers."""
    packs = [indices.micro_batch.pack for indices in step]
    return sum(pack.num_tokens for pack in packs if not pack.is_filler)


class PackTrainer(Trainer):
    """transformers' Trainer for packs: a step is one of its sampler, in as many passes as it needs.

    Checkpoints are complete or do not count, and a resumed training has the steps, losses and weights of one that was
    not interrupted.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        train_sampler: PackBatchSampler,
        *,
        eval_dataset: VQADataset | None = None,
        callbacks: Sequence[Any] = (),
        compiled: bool | None = None,
        captured: bool | None = None,
        flex: bool = True,
        checkpointing: Checkpointing = False,
        num_ahead: int = 2,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        """A trainer of a model on the packs of a sampler, which validates on `eval_dataset`.

        `args` says everything else, except batch sizes, which are the sampler's. On a GPU, decoder layers are
        `compiled` and passes `captured` as CUDA graphs where they can be, unless these are False. `flex`: FlexAttention
        computes the attention. `checkpointing`: activations of whole layers (True) or of MLPs ("selective") are
        computed again in the backward pass. `num_ahead` packs are made ahead. `optimizers` are an optimizer and its
        schedule, instead of those of `args`.

        Raises:
            UsageError: `args` accumulates gradients, or the sampler is for another number of processes.
        """
        _check_arguments(args, train_sampler)
        on_gpu, has_packs = args.device.type == "cuda", train_sampler.batch.has_packs
        self.train_sampler, self.num_ahead = train_sampler, num_ahead
        self.memory_hint = ""
        """What an error says at its end if the GPU is out of memory."""
        self.startup = Startup(quiet)
        """What times the warm-up and gets its notes."""
        self.compile_cache: CompileCache | None = None
        """Where compiled code is kept for other processes."""
        self.collator = DataCollatorForPacks(
            train_sampler.dataset, device=args.device, pads_to_blocks=has_packs and on_gpu
        )
        self.eval_sampler, self.eval_collator = None, self.collator
        if eval_dataset:
            whole = {"samples_per_step": len(eval_dataset), "order": "as_given"}
            batch, plan = train_sampler.batch.model_copy(update=whole), train_sampler.plan
            self.eval_sampler = PackBatchSampler.of(eval_dataset, batch, plan.seed, plan.rank, plan.num_ranks)
            self.eval_collator = DataCollatorForPacks(
                eval_dataset, device=args.device, pads_to_blocks=self.collator.pads_to_blocks
            )
        self.num_checkpoints, args.save_total_limit = args.save_total_limit, None  # Trainer's own order is by time
        self.checkpointing, self._flex = checkpointing, flex
        self.compiled = on_gpu if compiled is None else compiled and on_gpu
        self.captured = captured is not False and self._can_capture(model, args)
        self.passes: PackPasses | None = None
        """How packs go through the model, while it trains or validates."""
        self.first_pack: FirstPack | None = None
        """The rows that the first pack is compared with; None after the check."""
        self._resumed_from = -1
        self._num_losses_before = 0
        """Steps before this training resumed, whose losses it continues."""
        self.captures_all = False
        """Whether passes of all shapes are captured before the first step, and not when a pack first has a shape."""
        self.compiled_apart = 0
        """Graphs that were compiled within steps for other things than their passes."""
        self.of_rewards: RewardLoss | None = None
        """The loss of packs with advantages."""
        self.evaluations = Evaluations()
        self.seconds = 0.0
        """How long `train` took; Trainer's own figure is wrong if the clock is set meanwhile."""
        self.wait_seconds = 0.0
        self.num_tokens = 0
        """Tokens of the steps so far, without padding; the other ranks are taken to have as many as this one."""
        self._tokens_ahead: deque[int] = deque()
        """This rank's tokens of the steps that the prefetch thread has begun."""
        self._ahead: Prefetcher[PackIndices] | None = None
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_sampler.dataset,
            eval_dataset=eval_dataset,
            callbacks=list(callbacks),
            optimizers=optimizers,
        )
        self.add_callback(WarmUp(self))

    def _can_capture(self, model: Any, args: TrainingArguments) -> bool:
        """Whether passes over packs can be captured as CUDA graphs: one shape is always the same work, on the GPU.

        This is not so with a tower, whose shapes depend on its images, nor with linear attention, fp16 (loss scaling),
        sharded weights, and gradient checkpointing outside of compiled code (random states), which involve the CPU.
        """
        if args.device.type != "cuda" or not self.train_sampler.batch.has_packs:
            return False
        needs_cpu = (self.checkpointing and not self.compiled) or args.fp16 or is_sharded(model)
        return not (self.train_sampler.dataset.features.has_tower or needs_cpu or linear_layers(text_model(model)))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One item per step of an epoch, by which Trainer counts; the sampler decides what is in a step."""
        examples: Any = range(len(self.train_sampler.dataset))
        generator = torch.Generator()  # else each epoch would change the random state that dropout uses
        return DataLoader(examples, self.train_sampler.batch.samples_per_step, generator=generator)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; then end the prefetch thread and free the captured passes.

        Raises:
            TrainingError: the GPU is out of memory, or a file of the checkpoint holds more than numbers.
        """
        began, checkpoint = time.perf_counter(), kwargs.get("resume_from_checkpoint")
        if checkpoint is True:
            checkpoint = kwargs["resume_from_checkpoint"] = get_last_checkpoint(str(self.args.output_dir))  # type: ignore[no-untyped-call]
        self._resumed_from = step_of(Path(checkpoint)) if checkpoint else -1
        try:
            self._compute_rows()
            self.model.train()  # type: ignore[union-attr]  # from_pretrained leaves the layers in evaluation mode
            with (
                numbers_only(Path(checkpoint) if checkpoint else None),
                self._on_packs(),
                checkpointed(self.model, self.checkpointing),
            ):
                return super().train(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise TrainingError(self.out_of_memory()) from None
        finally:
            self.seconds = time.perf_counter() - began
            self.first_pack = None
            self.stop_prefetch()

    def _compute_rows(self) -> None:
        """Compute the rows that the first pack is compared with, while the model is as it was loaded."""
        if self.train_sampler.batch.has_packs and (pack := first_pack_of(self, max(self._resumed_from, 0))):
            with self.startup.timed("compute rows to check packs"):
                self.first_pack = FirstPack(self, pack)
            if self.args.device.type == "cuda":
                torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _on_packs(self) -> Iterator[None]:
        """Set the model up for packs within the block, unless it is."""
        if self.passes or not self.train_sampler.batch.has_packs:
            yield
            return
        options: dict[str, Any] = {"compiled": self.compiled, "captured": self.captured, "flex": self._flex}
        with packed_attention(self.model, of_rewards=self.of_rewards, **options) as self.passes:
            try:
                yield
            finally:
                self.passes = None

    def out_of_memory(self, num_tokens: int | None = None) -> str:
        """The message for a GPU out of memory; `num_tokens` is the length of the pack that did not fit, if known."""
        gpu, batch = torch.cuda.get_device_properties(self.args.device), self.train_sampler.batch
        return out_of_memory(gpu.total_memory / 1e9, batch.tokens_per_pack, num_tokens) + self.memory_hint

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The batches of the next step, prefetched across epochs."""
        if self.state.global_step == self._resumed_from:
            self._continue_losses()
        is_resumed = self.state.global_step == self._resumed_from
        if self.state.global_step >= self.state.max_steps or (is_resumed and self.evaluations.why_over(self.state)):
            # resumed after its last step
            self.control.should_training_stop = True
            return [], None
        next(epoch_iterator)
        return [self._next_step()], None

    def _next_step(self) -> Iterator[tuple[Batch, bool]]:
        """The batches of the next step, each with whether it is the last."""
        if not self._ahead:
            steps = self.train_sampler.steps(self.state.global_step, self.state.max_steps)
            self._ahead = Prefetcher(self._counted(steps), self.batch_of, self.args.device, self.num_ahead)
        return self._ahead.step()

    def first_packs(self, step: int) -> list[PackIndices]:
        """This rank's packs of the step before which packs are checked."""
        return next(self.train_sampler.steps(step, step + 1), [])

    def upcoming(self, start: int, end: int) -> tuple[list[PackIndices], Sequence[Example] | Mapping[int, Example]]:
        """Packs of all ranks of the steps `start` to `end`, enough to know their lengths; and their examples."""
        plan = self.train_sampler.plan
        return [self.indices_of(micro_batch) for micro_batch in plan.upcoming(start, end)], plan.examples

    def indices_of(self, micro_batch: MicroBatch) -> PackIndices:
        """The indices of a pack by itself."""
        [indices] = self.train_sampler.step_of([micro_batch])
        return indices

    def examples_of(self, indices: PackIndices) -> Mapping[int, Example]:
        """The examples of a pack by their numbers."""
        examples: Mapping[int, Example] = self.train_sampler.dataset.__getitems__(indices).examples
        return examples

    def batch_of(self, indices: PackIndices) -> Batch:
        """The batch of a pack, on the device."""
        return self.collator(self.train_sampler.dataset.__getitems__(indices))

    def eval_batch_of(self, indices: PackIndices) -> Batch:
        """The same for a pack of the validation."""
        assert self.eval_sampler is not None  # its truth value would pack all questions
        return self.eval_collator(self.eval_sampler.dataset.__getitems__(indices))

    def _counted(self, steps: Iterator[list[PackIndices]]) -> Iterator[list[PackIndices]]:
        """The steps, with their tokens noted; runs in the prefetch thread."""
        for step in steps:
            self._tokens_ahead.append(num_tokens(step))
            yield step

    def training_step(  # type: ignore[override]
        self, model: Any, inputs: Iterator[tuple[Batch, bool]], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run forward and backward over all micro-batches of a step; returns its loss times the number of ranks.

        Trainer and DDP average over ranks, but a step's loss is their sum.
        """
        if not self.model.training:  # type: ignore[union-attr]  # to find its modules takes 10 ms
            model.train()
        before = self._waited
        total = torch.zeros((), device=self.args.device)
        for batch, is_last in inputs:
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(model):
                total += self.forward_backward(model, batch)
        if self._averages_at_step_end(model):
            average_gradients(model)
        self.wait_seconds += self._waited - before
        self.num_tokens += self._tokens_ahead.popleft() * self.args.world_size
        return total

    def forward_backward(self, model: Any, batch: Batch) -> torch.Tensor:
        """Run forward and backward over one batch; returns its share of what `training_step` returns."""
        with self.compute_loss_context_manager():
            loss = pack_loss(model, batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def _averages_at_step_end(self, model: Any) -> bool:
        """Whether gradients are exchanged at the end of a step, and not by DDP in the backward pass."""
        return is_sharded(model) or (self.captured and self.args.world_size > 1)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Move the model as Trainer does, unless it is sharded and therefore in place."""
        if not is_sharded(model):
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model as Trainer does; without DDP, which would gather sharded weights and whose hooks cannot be
        captured, it only gets autocast."""
        if self._averages_at_step_end(model) and not getattr(model, "_is_accelerate_prepared", False):
            broadcast_trained(model)
            self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
            model._is_accelerate_prepared = True
        return super()._wrap_model(model, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as Trainer does, into a checkpoint that counts when it is whole; then delete the oldest ones."""
        is_first = self.args.should_save
        state: Any = self.state
        if state.global_step == self._resumed_from:
            return  # resumed after the last step
        checkpoint = Path(str(self.args.output_dir)) / f"checkpoint-{state.global_step}"
        num_bytes = checkpoint_bytes(self.model, self.optimizer)
        state.stateful_callbacks[LOSSES] = {
            "num_steps": self._num_losses,
            "logged": self._total_loss_scalar,
            "not_logged": float(self._add_up(self._tr_loss)) / self.args.world_size,
            "last_logged_step": self._globalstep_last_logged,
        }
        with saving(checkpoint, num_bytes) if is_first else contextlib.nullcontext():
            self.accelerator.wait_for_everyone()  # until the first rank has made the folder
            super()._save_checkpoint(model, trial)
        if is_first and self.num_checkpoints:
            delete_old(checkpoint, state.best_model_checkpoint, self.num_checkpoints)

    def _continue_losses(self) -> None:
        """Continue the sums of losses of the checkpoint, as if there had been no stop; Trainer starts with none."""
        state: Any = self.state
        if losses := state.stateful_callbacks.get(LOSSES):
            self._num_losses_before = losses["num_steps"]
            self._total_loss_scalar, self._globalstep_last_logged = losses["logged"], losses["last_logged_step"]
            self._tr_loss.fill_(losses["not_logged"])

    @property
    def _num_losses(self) -> int:
        """How many steps the sums of losses have."""
        return self._num_losses_before + int(self.state.global_step) - max(self._resumed_from, 0)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does; `train_loss` is the mean over all steps, not over those since a training resumed."""
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self._num_losses, 1)
        super().log(logs, *args, **kwargs)

    def _load_best_model(self) -> None:
        """Load it as Trainer does, after a comparison of its checksums."""
        check_undamaged(Path(str(self.state.best_model_checkpoint)))
        super()._load_best_model()

    def _save_rng_state(self, output_dir: str) -> None:
        """Save as Trainer does, on all ranks before the first writes the file that completes the checkpoint."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def floating_point_ops(self, inputs: Any) -> int:
        """Always 0: Trainer's estimate knows neither packs nor frozen weights."""
        return 0

    @property
    def bytes_read(self) -> int:
        """Bytes of features read from disk so far; 0 for other sources."""
        return int(getattr(self.train_sampler.dataset.features, "bytes_read", 0))

    @property
    def _waited(self) -> float:
        return self._ahead.wait_seconds if self._ahead else 0.0

    def stop_prefetch(self) -> None:
        if self._ahead:
            self._ahead.close()
        self._ahead = None

    @torch.no_grad()
    def validation_loss(self, batch: Batch) -> torch.Tensor:
        """A batch's share of the validation loss."""
        with self.compute_loss_context_manager():
            return share_of_loss(self.model, batch)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure and log what is due."""
        metrics = self._validate() if self.evaluations.validates else {}
        if self.evaluations.answers:
            answered = self.evaluations.score(self.model)
            self.log(answered)
            metrics |= answered
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.accelerator.reduce(numbers.to(self.args.device), "sum")
        return total

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as Trainer does; a schedule that follows the validation loss waits until that is measured."""
        return super()._evaluate(*args, **kwargs | {"skip_scheduler": not self.evaluations.validates})

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Compare only if what the best checkpoint is chosen by was measured."""
        measured = f"eval_{self.args.metric_for_best_model}" in metrics
        return measured and super()._determine_best_metric(metrics, trial)

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """The validation loss over all samples, weighted as in training; it does not depend on how they are batched."""
        sampler = self.eval_sampler
        assert sampler is not None
        model: Any = self.model
        model.eval()
        total = torch.zeros((), device=self.args.device)
        ahead = Prefetcher(
            map(sampler.step_of, sampler.plan.epoch(0)), self.eval_batch_of, self.args.device, self.num_ahead
        )
        with self._on_packs(), contextlib.closing(ahead):
            for batch, _ in ahead.step():
                total += self.validation_loss(batch)
        if is_sharded(model):
            model.reshard()  # else only the first rank would, when it saves, and the next step would hang
        metrics = {"eval_loss": float(self._add_up(total))}
        self.log(metrics)
        return metrics
