"""transformers' Trainer, set up from the run file.

Design: Trainer does what it does for everybody (loop, checkpoints, resume, mixed precision, several GPUs). To it, an
item of the data is a whole optimizer step, so that steps can have exactly so many samples in however many forward
passes; `training_step` runs them one after the other, with gradients exchanged between processes after the last. Its
loader only counts. What a step is follows from the seed and its number alone: a resumed training goes to its place
without reading, and batches are made a few forward passes ahead, from one epoch into the next.
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
from lookonce.text import size
from lookonce.train.data.batches import Feed
from lookonce.train.data.features import Batch
from lookonce.train.data.packing import padded_length
from lookonce.train.data.prefetch import ReadAhead
from lookonce.train.model.attention import PackMask
from lookonce.train.model.cuda_graphs import RecordedPasses, Shape, cuda_graphs
from lookonce.train.model.fsdp import average_gradients, broadcast_trained, is_sharded
from lookonce.train.model.loss import forward_loss

CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)
"""What TrainingArguments calls it; the second is transformers 5.17's name."""
TF32_CAPABILITY = (8, 0)
"""Of the first GPUs that have TensorFloat-32 (Ampere)."""


class RunTrainer(Trainer):
    """Trainer whose steps are cut into forward passes of its own, and that knows how long it has waited for data."""

    def __init__(
        self,
        model: Any,
        arguments: TrainingArguments,
        feed: Feed,
        eval_feed: Feed | None = None,
        num_ahead: int = 2,
        callbacks: Sequence[Any] = (),
        *,
        uses_graphs: bool = False,
    ) -> None:
        """`uses_graphs`: passes over packs are recorded and replayed, once `record_passes` has been called."""
        self.feed, self.eval_feed, self.num_ahead, self.uses_graphs = feed, eval_feed, num_ahead, uses_graphs
        self._passes: RecordedPasses | None = None
        self.wait_seconds = 0.0
        self._ahead: ReadAhead | None = None
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=feed.order.examples,
            eval_dataset=eval_feed.order.examples if eval_feed else None,
            callbacks=list(callbacks),
        )
        self.mask = PackMask(padded_length(feed.order.batch.tokens_per_pack), feed.device)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As many items as an epoch has steps, by which Trainer counts; what a step is, `order` says."""
        examples: Any = range(len(self.feed.order.examples))
        generator = torch.Generator()  # else each epoch would draw from the state that dropout draws from
        return DataLoader(examples, self.feed.order.batch.samples_per_step, generator=generator)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, and no thread is left over, nor the memory of recorded passes."""
        try:
            return super().train(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise TrainingError(out_of_memory(self.feed)) from None
        finally:
            self.stop_reading()
            self._passes = None

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The next step, its batches made ahead, beyond an epoch's end too; Trainer's hook."""
        if self.state.global_step >= self.state.max_steps:  # a training is resumed that had made its last step
            self.control.should_training_stop = True
            return [], None
        if not self._ahead:
            steps = self.feed.order.steps(self.state.global_step, self.state.max_steps)
            self._ahead = ReadAhead(steps, self.feed.batch, self.feed.device, self.num_ahead)
        next(epoch_iterator)
        return [self._ahead.step()], None

    def training_step(  # type: ignore[override]
        self, model: Any, inputs: Iterator[tuple[Batch, bool]], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of all parts of a step; gives its loss, times the number of processes.

        Trainer and DDP take means over processes, and a step's loss is the sum.
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
        if self._averages(model):
            average_gradients(model)
        self.wait_seconds += self._waited - before
        return total

    def forward_backward(self, model: Any, batch: Batch) -> torch.Tensor:
        """Go forward and backward over one batch; gives its part of what `training_step` gives."""
        with self.compute_loss_context_manager():
            loss = forward_loss(model, batch, self.mask) * self.args.world_size
        self.accelerator.backward(loss)
        part: torch.Tensor = loss.detach()
        return part

    def record_passes(self, trained: Sequence[torch.Tensor], shapes: Sequence[Shape], like: Batch) -> None:
        """From now on record and replay passes, which give gradients to `trained`.

        Those over packs of `shapes`, which have what the batch `like` has, are recorded at once.
        """
        run = partial(self.forward_backward, self.model_wrapped)
        self._passes = RecordedPasses(run, trained, self.feed.prompter.merge_size, cuda_graphs())
        for shape in shapes:
            self._passes.prepare(shape, like)

    def _averages(self, model: Any) -> bool:
        """Whether gradients are exchanged at a step's end, and not by DDP in each backward pass."""
        return is_sharded(model) or (self.uses_graphs and self.args.world_size > 1)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Trainer's; a model that is sharded is where it should be."""
        if not is_sharded(model):
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; without DDP, which would put together what is sharded and whose hooks can not be recorded, it gets
        autocast alone."""
        if self._averages(model) and not getattr(model, "_is_accelerate_prepared", False):
            broadcast_trained(model)
            self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
            model._is_accelerate_prepared = True
        return super()._wrap_model(model, *args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        """Trainer's, for all ranks before the first writes the file that makes a checkpoint whole."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: Trainer's estimate knows neither packs nor frozen weights."""
        return 0

    @property
    def bytes_read(self) -> int:
        """Of features, from disk so far; 0 if images come from elsewhere."""
        return int(getattr(self.feed.vision, "bytes_read", 0))

    @property
    def _waited(self) -> float:
        return self._ahead.wait_seconds if self._ahead else 0.0

    def stop_reading(self) -> None:
        """End the thread that reads ahead."""
        if self._ahead:
            self._ahead.close()
        self._ahead = None

    @torch.no_grad()
    def validation_loss(self, batch: Batch) -> torch.Tensor:
        """A batch's part of the validation loss."""
        with self.compute_loss_context_manager():
            return forward_loss(self.model, batch, self.mask)

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The validation loss: over all samples, weighed as the training's is, however they fall into batches."""
        assert self.eval_feed
        model: Any = self.model
        model.eval()
        total = torch.zeros((), device=self.args.device)
        feed = self.eval_feed
        with contextlib.closing(ReadAhead(feed.order.epoch(0), feed.batch, feed.device, self.num_ahead)) as ahead:
            for batch, _ in ahead.step():
                total += self.validation_loss(batch)
        if is_sharded(model):
            model.reshard()  # else saving would do so on the first rank alone, and the next step wait for it for ever
        total = self.accelerator.reduce(total, "sum")
        metrics = {"eval_loss": float(total)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def out_of_memory(feed: Feed, num_tokens: int | None = None) -> str:
    """What to say when the GPU's memory does not suffice, for a pack of so many tokens if that is known."""
    total = torch.cuda.get_device_properties(feed.device).total_memory
    what = f"a pack of {num_tokens:,} tokens does not fit" if num_tokens else "there is no room left on"
    return (
        f"{what} this GPU of {size(total)}; lower batch.tokens_per_pack (now {feed.order.batch.tokens_per_pack:,}) or "
        "set train.gradient_checkpointing: true"
    )


def training_arguments(run: RunFile, folder: Path, **overrides: Any) -> TrainingArguments:
    """Trainer's own settings for a run; checkpoints go to `folder`.

    Raises:
        UsageError: the precision or a library needs what is not here, or a name is not one of Trainer's.
    """
    if run.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("train.tensorboard needs tensorboard; install it with: pip install 'lookonce[track]'")
    options, on_gpu = run.train, torch.cuda.is_available()
    if options.precision == "fp16" and not on_gpu:
        raise UsageError("train.precision: fp16 needs a GPU, and there is none here; use bf16 or fp32")
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": options.epochs,
        "max_steps": options.steps or -1,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": options.scheduler,
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
        raise UsageError(f"the `train` section does not fit together: {str(error).splitlines()[0]}") from None
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else Trainer cuts batches for DataParallel, and features have no batch dimension to cut
    return arguments
