"""transformers' Trainer, set up from the run file, and what is measured while training.

Trainer keeps the loop, optimizer, scheduler, mixed precision, checkpoints and resuming. We override:

    Trainer calls               we do
    get_train_dataloader        count the steps of an epoch, without data
    get_batch_samples           return the batches of the next step, from the prefetch thread
    training_step               run forward and backward over all micro-batches of the step, or replay CUDA graphs
    evaluate                    measure what is due: the validation loss over the whole split, exact match
    _evaluate                   leave a schedule that follows the validation loss alone if this was not measured
    _determine_best_metric      compare only if what the best checkpoint is chosen by was measured
    _wrap_model                 skip DDP where gradients are exchanged at the end of a step
    _move_model_to_device       skip a sharded model, which is in place
    _save_checkpoint            record the losses so far, write checksums last, delete old checkpoints by their step
    _save_rng_state             wait for all ranks before the checkpoint becomes complete
    _load_best_model            compare its checksums first
    log                         make `train_loss` the mean over all steps, not over those since a training resumed
    floating_point_ops          return 0: Trainer's estimate knows neither packs nor frozen weights
    train (called by us)        measure its seconds, report out of memory, end the prefetch thread, free the CUDA graphs

Design: to Trainer, one item of data is a whole optimizer step, so that a step has exactly `samples_per_step` samples in
any number of forward passes. A step follows from the seed and its number alone, so a resumed training continues without
reading the steps before, and batches are prefetched across epochs.

Trainer decides when the validation loss is due, and the callback `Evaluations` when answers are. Both are measured in
Trainer's evaluation, which comes before a checkpoint that is due at the same step, so a resumed training lacks no
measurement. Answering changes neither the weights nor the random state, so a training has the same numbers with and
without it. It costs the time in which the questions are answered, which is logged.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from lookonce.errors import TrainingError, UsageError
from lookonce.run.config import RunFile
from lookonce.run.folder import step_of
from lookonce.run.sections import Checkpointing
from lookonce.train.data.batches import Batch, BatchMaker, Prefetcher
from lookonce.train.data.packing import padded_length
from lookonce.train.data.sampler import MicroBatch
from lookonce.train.loop.checkpoints import LOSSES, check_undamaged, checkpoint_bytes, delete_old, saving
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import checkpointed
from lookonce.train.model.cuda_graphs import CapturedPasses, Shape, cuda_graph_capture
from lookonce.train.model.gpu_memory import out_of_memory
from lookonce.train.model.load import average_gradients, broadcast_trained, is_sharded
from lookonce.train.model.loss import forward_loss

Answer = Callable[[Any], dict[str, float]]
"""Lets a model answer this rank's share of the questions; returns the numbers `right` and `questions`."""


class Evaluations(TrainerCallback):
    """Asks Trainer for an evaluation when answers are due, and says what the evaluation measures.

    It must come before callbacks that stop a training, because what is due is measured first.
    """

    def __init__(self, every: int | Literal["epoch"] | None = None, answer: Answer | None = None) -> None:
        """Answers are due after `every` epoch or number of steps, and after the last step."""
        self._every, self._answer = every, answer
        self.validates, self.answers = True, False
        """What the next evaluation measures: the validation loss, and the exact match."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(control, self._answer is not None and self._is_due(state))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(control, False)  # the epoch's last step has ended before

    def _is_due(self, state: Any) -> bool:
        if state.global_step >= state.max_steps:
            return True
        return bool(state.epoch.is_integer() if self._every == "epoch" else state.global_step % self._every == 0)

    def _note(self, control: Any, answers: bool) -> None:
        self.validates, self.answers = control.should_evaluate, answers
        control.should_evaluate = control.should_evaluate or answers

    def exact_match(self, model: Any, add_up: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The exact match of a model's answers, over all ranks; `add_up` gives the sums of all ranks' numbers."""
        assert self._answer
        began = time.perf_counter()
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            counted = self._answer(model)
        right, questions = add_up(torch.tensor([counted["right"], counted["questions"]])).tolist()
        seconds = round(time.perf_counter() - began, 3)
        return {"eval_exact_match": right / questions, "eval_num_questions": questions, "eval_seconds": seconds}


def check_can_answer(run: RunFile, num_ranks: int) -> None:
    """Check that a training can answer questions, if it is asked to.

    Raises:
        UsageError: its weights are sharded, so no rank has all of them.
    """
    if run.eval.every and run.train.fsdp and num_ranks > 1:
        raise UsageError(
            "eval.every cannot answer questions with weights that train.fsdp shards over several ranks; set "
            "train.fsdp: false if the model fits on one GPU, or eval.every: null and run after training: lookonce eval "
            f"{run.output}"
        )


class RunTrainer(Trainer):
    """Trainer over whole optimizer steps, which measures how long it waits for data."""

    def __init__(
        self,
        model: Any,
        arguments: TrainingArguments,
        batch_maker: BatchMaker,
        eval_batch_maker: BatchMaker | None = None,
        num_ahead: int = 2,
        callbacks: Sequence[Any] = (),
        *,
        uses_graphs: bool = False,
        uses_flex: bool = True,
        num_checkpoints: int = 2,
        checkpointing: Checkpointing = False,
        memory_hint: str = "",
    ) -> None:
        """`uses_graphs`: passes over packs are captured and replayed after `capture_passes` has been called.
        `uses_flex`: on a GPU, FlexAttention computes the attention over packs. `num_checkpoints` are kept.
        `memory_hint`: what an error says if the GPU is out of memory."""
        self.batch_maker, self.eval_batch_maker = batch_maker, eval_batch_maker
        self.num_ahead, self.uses_graphs = num_ahead, uses_graphs
        self.num_checkpoints, self.checkpointing, self.memory_hint = num_checkpoints, checkpointing, memory_hint
        self._resumed_from = -1
        self._num_losses_before = 0
        """Steps before this training resumed, whose losses it continues."""
        self.captures_all = False
        """Whether passes of all shapes are captured before the first step, and not when a pack first has a shape."""
        self._passes: CapturedPasses | None = None
        self.evaluations = Evaluations()
        self.seconds = 0.0
        """How long `train` took; Trainer's own figure is wrong if the clock is set meanwhile."""
        self.wait_seconds = 0.0
        self.num_tokens = 0
        """Tokens of the steps so far, without padding; the other ranks are taken to have as many as this one."""
        self._tokens_ahead: deque[int] = deque()
        """This rank's tokens of the steps that the prefetch thread has begun."""
        self._ahead: Prefetcher[MicroBatch] | None = None
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=batch_maker.sampler.examples,
            eval_dataset=eval_batch_maker.sampler.examples if eval_batch_maker else None,
            callbacks=list(callbacks),
        )
        max_tokens = padded_length(batch_maker.sampler.batch.tokens_per_pack)
        self.mask = PackMask(max_tokens, batch_maker.device, flex=uses_flex)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One item per step of an epoch, by which Trainer counts; the sampler decides what is in a step."""
        examples: Any = range(len(self.batch_maker.sampler.examples))
        generator = torch.Generator()  # else each epoch would change the random state that dropout uses
        return DataLoader(examples, self.batch_maker.sampler.batch.samples_per_step, generator=generator)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; then end the prefetch thread and free the captured passes.

        Raises:
            TrainingError: the GPU is out of memory.
        """
        began, checkpoint = time.perf_counter(), kwargs.get("resume_from_checkpoint")
        self._resumed_from = step_of(Path(checkpoint)) if checkpoint else -1
        try:
            with checkpointed(self.model, self.checkpointing):
                return super().train(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise TrainingError(self.out_of_memory()) from None
        finally:
            self.seconds = time.perf_counter() - began
            self.stop_prefetch()
            self._passes = None

    def out_of_memory(self, num_tokens: int | None = None) -> str:
        """The message for a GPU out of memory; `num_tokens` is the length of the pack that did not fit, if known."""
        gpu, batch = torch.cuda.get_device_properties(self.batch_maker.device), self.batch_maker.sampler.batch
        return out_of_memory(gpu.total_memory / 1e9, batch.tokens_per_pack, num_tokens) + self.memory_hint

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The batches of the next step, prefetched across epochs."""
        if self.state.global_step == self._resumed_from:
            self._continue_losses()
        if self.state.global_step >= self.state.max_steps:  # resumed after its last step
            self.control.should_training_stop = True
            return [], None
        if not self._ahead:
            steps = self.batch_maker.sampler.steps(self.state.global_step, self.state.max_steps)
            self._ahead = Prefetcher(
                self._counted(steps), self.batch_maker.batch, self.batch_maker.device, self.num_ahead
            )
        next(epoch_iterator)
        return [self._ahead.step()], None

    def _counted(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The steps, with their tokens noted; runs in the prefetch thread."""
        for step in steps:
            packs = [micro_batch.pack for micro_batch in step if not micro_batch.pack.is_filler]
            self._tokens_ahead.append(sum(pack.num_tokens for pack in packs))
            yield step

    def training_step(  # type: ignore[override]
        self, model: Any, inputs: Iterator[tuple[Batch, bool]], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run forward and backward over all micro-batches of a step; returns its loss times the number of ranks.

        Trainer and DDP average over ranks, but a step's loss is their sum.
        """
        model.train()
        before = self._waited
        total = torch.zeros((), device=self.args.device)
        if self._passes:
            self._passes.begin_step()
        for batch, is_last in inputs:
            if self._passes:
                total += self._passes(batch)
            else:
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
            loss = forward_loss(model, batch, self.mask) * self.args.world_size
        self.accelerator.backward(loss)
        detached: torch.Tensor = loss.detach()
        return detached

    def capture_passes(self, trained: Sequence[torch.Tensor], shapes: Sequence[Shape], like: Batch) -> None:
        """Capture and replay passes from now on; `trained` are the weights that get gradients.

        Packs of `shapes` are captured at once; `like` is a batch with the same keys as theirs.
        """
        run = partial(self.forward_backward, self.model_wrapped)
        self._passes = CapturedPasses(run, trained, self.batch_maker.chat_tokenizer.merge_size, cuda_graph_capture())
        for shape in shapes:
            self._passes.prepare(shape, like)

    def _averages_at_step_end(self, model: Any) -> bool:
        """Whether gradients are exchanged at the end of a step, and not by DDP in the backward pass."""
        return is_sharded(model) or (self.uses_graphs and self.args.world_size > 1)

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
        if is_first:
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
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self._num_losses, 1)
        super().log(logs, *args, **kwargs)

    def _load_best_model(self) -> None:
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
        return int(getattr(self.batch_maker.source, "bytes_read", 0))

    @property
    def _waited(self) -> float:
        return self._ahead.wait_seconds if self._ahead else 0.0

    def stop_prefetch(self) -> None:
        """End the prefetch thread."""
        if self._ahead:
            self._ahead.close()
        self._ahead = None

    @torch.no_grad()
    def validation_loss(self, batch: Batch) -> torch.Tensor:
        """A batch's share of the validation loss."""
        with self.compute_loss_context_manager():
            return forward_loss(self.model, batch, self.mask)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure and log what is due."""
        metrics = self._validate() if self.evaluations.validates else {}
        if self.evaluations.answers:
            answered = self.evaluations.exact_match(self.model, self._add_up)
            self.log(answered)
            metrics |= answered
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.accelerator.reduce(numbers.to(self.args.device), "sum")
        return total

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super()._evaluate(*args, **kwargs | {"skip_scheduler": not self.evaluations.validates})

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        measured = f"eval_{self.args.metric_for_best_model}" in metrics
        return measured and super()._determine_best_metric(metrics, trial)

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """The validation loss over all samples, weighted as in training; it does not depend on how they are batched."""
        assert self.eval_batch_maker
        model: Any = self.model
        model.eval()
        total = torch.zeros((), device=self.args.device)
        batch_maker = self.eval_batch_maker
        with contextlib.closing(
            Prefetcher(batch_maker.sampler.epoch(0), batch_maker.batch, batch_maker.device, self.num_ahead)
        ) as ahead:
            for batch, _ in ahead.step():
                total += self.validation_loss(batch)
        if is_sharded(model):
            model.reshard()  # else only the first rank would, when it saves, and the next step would hang
        metrics = {"eval_loss": float(self._add_up(total))}
        self.log(metrics)
        return metrics
