"""transformers' Trainer, set up from the run file.

Trainer keeps the loop, optimizer, scheduler, mixed precision, checkpoints and resuming. We override:

    Trainer calls               we do
    get_train_dataloader        count the steps of an epoch, without data
    get_batch_samples           return the batches of the next step, from the prefetch thread
    training_step               run forward and backward over all micro-batches of the step, or replay CUDA graphs
    evaluate                    compute the validation loss over the whole split, weighted as in training
    _wrap_model                 skip DDP where gradients are exchanged at the end of a step
    _move_model_to_device       skip a sharded model, which is in place
    _save_rng_state             wait for all ranks before the checkpoint becomes complete
    floating_point_ops          return 0: Trainer's estimate knows neither packs nor frozen weights
    train (called by us)        report out of memory, end the prefetch thread, free the CUDA graphs

Design: to Trainer, one item of data is a whole optimizer step, so that a step has exactly `samples_per_step` samples in
any number of forward passes. A step follows from the seed and its number alone, so a resumed training continues without
reading the steps before, and batches are prefetched across epochs.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from lookonce.errors import TrainingError, UsageError
from lookonce.run.config import RunFile
from lookonce.text import first_line, size
from lookonce.train.data.batches import BatchMaker
from lookonce.train.data.features import Batch
from lookonce.train.data.packing import padded_length
from lookonce.train.data.prefetch import Prefetcher
from lookonce.train.loop.scheduler import check_scheduler
from lookonce.train.model.attention import PackMask
from lookonce.train.model.cuda_graphs import CapturedPasses, Shape, cuda_graph_capture
from lookonce.train.model.fsdp import average_gradients, broadcast_trained, is_sharded
from lookonce.train.model.loss import forward_loss

CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)
"""The name of this setting in TrainingArguments; the second is that of transformers 5.17."""
TF32_CAPABILITY = (8, 0)
"""CUDA capability of the first GPUs with TensorFloat-32 (Ampere)."""


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
    ) -> None:
        """`uses_graphs`: passes over packs are captured and replayed after `capture_passes` has been called."""
        self.batch_maker, self.eval_batch_maker = batch_maker, eval_batch_maker
        self.num_ahead, self.uses_graphs = num_ahead, uses_graphs
        self._passes: CapturedPasses | None = None
        self.wait_seconds = 0.0
        self._ahead: Prefetcher | None = None
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=batch_maker.sampler.examples,
            eval_dataset=eval_batch_maker.sampler.examples if eval_batch_maker else None,
            callbacks=list(callbacks),
        )
        self.mask = PackMask(padded_length(batch_maker.sampler.batch.tokens_per_pack), batch_maker.device)

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
        try:
            return super().train(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise TrainingError(out_of_memory(self.batch_maker)) from None
        finally:
            self.stop_prefetch()
            self._passes = None

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The batches of the next step, prefetched across epochs."""
        if self.state.global_step >= self.state.max_steps:  # resumed after its last step
            self.control.should_training_stop = True
            return [], None
        if not self._ahead:
            steps = self.batch_maker.sampler.steps(self.state.global_step, self.state.max_steps)
            self._ahead = Prefetcher(steps, self.batch_maker.batch, self.batch_maker.device, self.num_ahead)
        next(epoch_iterator)
        return [self._ahead.step()], None

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

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
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
        total = self.accelerator.reduce(total, "sum")
        metrics = {"eval_loss": float(total)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def out_of_memory(batch_maker: BatchMaker, num_tokens: int | None = None) -> str:
    """The message for a GPU out of memory; `num_tokens` is the length of the pack that did not fit, if known."""
    total = torch.cuda.get_device_properties(batch_maker.device).total_memory
    what = f"out of memory: a pack of {num_tokens:,} tokens does not fit" if num_tokens else "out of memory on"
    length = batch_maker.sampler.batch.tokens_per_pack
    return (
        f"{what} this GPU of {size(total)}; lower batch.tokens_per_pack (now {length:,}) or set "
        "train.gradient_checkpointing: true"
    )


def training_arguments(run: RunFile, folder: Path, **overrides: Any) -> TrainingArguments:
    """Trainer's settings for a run; checkpoints go to `folder`.

    Raises:
        UsageError: hardware or a library that the settings need is missing, or Trainer does not know a name.
    """
    if run.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("train.tensorboard needs tensorboard; install it with: pip install 'lookonce[track]'")
    options, on_gpu = run.train, torch.cuda.is_available()
    if options.precision == "fp16" and not on_gpu:
        raise UsageError("train.precision: fp16 needs a GPU, and this machine has none; use bf16 or fp32")
    check_scheduler(options)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": options.epochs,
        "max_steps": options.steps or -1,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": options.scheduler,
        "lr_scheduler_kwargs": dict(options.scheduler_args),
        "warmup_steps": options.warmup,
        "optim": options.optimizer,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "bf16": options.precision == "bf16",
        "fp16": options.precision == "fp16",
        "tf32": options.tf32 if on_gpu and torch.cuda.get_device_capability() >= TF32_CAPABILITY else None,
        "use_cpu": not on_gpu,
        CHECKPOINTING: options.gradient_checkpointing,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "logging_steps": options.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no" if not run.data.val else "epoch" if options.eval_steps is None else "steps",
        "eval_steps": options.eval_steps,
        "save_strategy": "epoch" if options.save_steps is None else "steps",
        "save_steps": options.save_steps or 500,
        "save_total_limit": options.save_total_limit,
        "load_best_model_at_end": options.load_best_model_at_end,
        "seed": options.seed,
        "report_to": "tensorboard" if options.tensorboard else "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "prediction_loss_only": True,
    }
    try:
        arguments = TrainingArguments(**settings | overrides)
    except ValueError as error:
        raise UsageError(f"the `train` section is not valid: {first_line(error)}") from None
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else Trainer uses DataParallel, which splits batches; features have no batch dimension
    return arguments
