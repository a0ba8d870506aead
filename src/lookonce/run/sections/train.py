"""The section `train` of the run file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lookonce.run.sections.numbers import Count
from lookonce.run.sections.paths import UserPath
from lookonce.run.sections.start import StartFrom
from lookonce.settings import MAX_COUNT, ByContent, Extends, Free, OnResume, Same, Section, Seed, number_from_text

Tracker = Literal["tensorboard", "wandb", "mlflow"]
Argument = Annotated[int | float, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
SchedulerArgument = Annotated[bool | Argument | str, BeforeValidator(number_from_text)]
Frozen = Literal["precision", "fp8", "int8", "nf4"]
Checkpointing = Literal[False, True, "selective"]
UNQUANTISED = "precision"
"""The value of `frozen` for weights that are not quantised."""


class TrainSection(Section):
    """The training."""

    start_from: ByContent[StartFrom | None] = None
    """Another run, by its output folder or its run file, with whose trained adapter this training starts; or an adapter
    that `lookonce adapter push` uploaded: `hf://owner/name@COMMIT`. Its section `lora` must be the same apart from
    `dropout`. Only the weights are taken: optimizer and schedule are new, nothing is merged, and that run stays as it
    is. By default a new adapter is trained."""
    epochs: Extends[Annotated[float, Field(ge=0, le=1_000_000)]] = 3
    """How many times the training records are passed through; fractions are allowed. Ignored if `steps` is set. With 0
    nothing is trained: the adapter of `start_from` answers as it is, with this run's other settings."""
    steps: Extends[Count | None] = None
    """Number of optimizer steps; by default it follows from `epochs`."""
    precision: Same[Literal["bf16", "fp16", "fp32"]] = "bf16"
    """Precision of the frozen weights and of autocast. Trained weights are always float32."""
    frozen: Same[Frozen] = "precision"
    """How the frozen weights of the decoder layers are kept. `precision`: as `precision` says. `fp8`: their products
    are computed in 8-bit floating point, which is faster on GPUs that can (Ada, Hopper and later). `int8` and `nf4`:
    rounded to 8 or 4 bits (QLoRA), which takes less GPU memory. Needs: pip install 'lookonce[qlora]'."""
    tf32: Same[bool] = True
    """Use TensorFloat-32 for float32 matrix products on GPUs that have it (Ampere and later)."""
    optimizer: Same[str] = "adamw_torch_fused"
    """Any optimizer name of transformers' TrainingArguments."""
    learning_rate: Same[Annotated[float, Field(ge=1e-12, le=10)]] = 2e-4
    """Peak learning rate: reached after `warmup`, then lowered by `scheduler`."""
    scheduler: Same[str] = "cosine"
    """Learning rate schedule: a name of transformers' SchedulerType, for example linear, constant_with_warmup or
    cosine_with_min_lr."""
    scheduler_args: Same[dict[str, SchedulerArgument]] = {}
    """Arguments of the schedule, which some need: {min_lr_rate: 0.1} for cosine_with_min_lr, {num_decay_steps: 100} for
    warmup_stable_decay."""
    warmup: Same[Annotated[float, Field(ge=0, le=MAX_COUNT)]] = 0.03
    """Steps in which the learning rate rises from 0 to its peak; a value below 1 is a fraction of all steps."""
    weight_decay: Same[Annotated[float, Field(ge=0, le=1000)]] = 0.0
    """Weight decay of the optimizer; 0 disables it."""
    max_grad_norm: Same[Annotated[float, Field(ge=0, le=1_000_000)]] = 1.0
    """Gradients are scaled down to at most this norm; 0 disables clipping."""
    gradient_checkpointing: Same[Checkpointing] = False
    """Compute activations again in the backward pass instead of storing them: less GPU memory, slower steps.
    `selective`: those of each layer's MLP, half of what is stored. true: all, for the least memory. Losses and
    gradients are the same; with `lora.dropout` on a GPU, true draws other random numbers."""
    compile: Free[bool] = True
    """Compile the decoder layers with torch.compile, on a GPU only. Takes up to a minute, once for all pack lengths."""
    compile_cache: Free[UserPath | None] = None
    """Folder in which compiled code is kept, so that later trainings of the model on such a GPU with the same versions
    begin sooner; by default `compiler` in `cache.dir`. Runs, ranks and machines may share it. Files of other users are
    not read."""
    flex_attention: Free[bool] = True
    """Compute the attention over packs with FlexAttention, on a GPU only. Otherwise PyTorch's own attention gets a
    dense mask: slower, and its memory grows with the square of `tokens_per_pack`."""
    cuda_graphs: Free[bool] = True
    """Capture passes over packs as CUDA graphs, so that the GPU does not wait for the CPU to launch kernels. The graphs
    keep their memory until training ends. Not used with fp16, fsdp or `separate` mode, nor
    with gradient checkpointing if `compile` is false."""
    fsdp: Free[bool] = False
    """Shard the frozen weights over the GPUs of a distributed training (FSDP2), for models too large for one GPU."""
    prefetch: Free[Annotated[int, Field(ge=1, le=1024)]] = 2
    """Number of forward passes whose batches are prepared ahead, while the steps before them run."""
    host_cache_gb: Free[Annotated[float, Field(ge=0, le=100_000)]] = 0
    """Gigabytes of host memory for the most recently used features; 0 reads them from disk every time."""
    logging_steps: Free[Count] = 10
    """Print and log the loss every this many steps."""
    eval_steps: Annotated[Count | None, OnResume("free", unless_best=("loss",))] = None
    """Measure the validation loss every this many steps; by default after each epoch."""
    save_steps: Annotated[Count | None, OnResume("free", unless_best=("loss", "exact_match"))] = None
    """Save a checkpoint every this many steps; by default after each epoch."""
    save_total_limit: Free[Annotated[int, Field(ge=1, le=10_000)]] = 2
    """Number of checkpoints to keep; older ones are deleted."""
    best: Same[Literal["loss", "exact_match"] | None] = None
    """The checkpoint that is the result: `loss` is the one with the lowest validation loss, `exact_match` the one with
    the most right answers (see `eval.every`). By default the last step."""
    seed: Same[Seed] = 42
    """Seed of the adapter's initial weights, the order of the records, dropout, and the share of `data.where`."""
    track: Free[list[Tracker]] = []
    """Trackers that also get the log, the settings and the scores: tensorboard, wandb, mlflow; one or a list. Their
    files lie in the run folder; environment variables such as WANDB_PROJECT and MLFLOW_TRACKING_URI are followed.
    Needs: pip install 'lookonce[track]' for TensorBoard, 'lookonce[wandb]', 'lookonce[mlflow]'."""

    @property
    def has_steps(self) -> bool:
        """Whether anything is trained."""
        return bool(self.steps or self.epochs)

    @model_validator(mode="after")
    def _shards_what_it_can(self) -> TrainSection:
        if self.fsdp and self.frozen != UNQUANTISED:
            raise ValueError(f"fsdp cannot shard quantised weights (got frozen={self.frozen}); remove one of the two")
        return self

    @model_validator(mode="after")
    def _has_an_adapter(self) -> TrainSection:
        if not (self.has_steps or self.start_from):
            raise ValueError("without `epochs` there is nothing to train, so `start_from` must name a trained run")
        return self
