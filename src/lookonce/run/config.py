"""The run file: one YAML page that says what a run is.

Every key is below, with its meaning, its default and what is allowed; the docstrings are also pydantic's field
descriptions. Unknown keys are refused, so that a misspelt key is never ignored silently. Paths are relative to the
working directory. The resolved configuration is saved with the run, with absolute paths (absolute.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from lookonce.cache.constants import Backend, DtypeName
from lookonce.datasets.formats.registry import FormatName
from lookonce.run.paths import ModelName, Paths, StagePath, UserPath, as_list
from lookonce.run.removed import refuse_removed_keys
from lookonce.settings import Section, number_from_text, read_settings, set_key

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
SchedulerArgument = Annotated[bool | int | float | str, BeforeValidator(number_from_text)]


class ModelSection(Section):
    """The model that is fine-tuned."""

    path: ModelName
    """A model folder, or the name of a model on the Hugging Face Hub (owner/name)."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; by default its main branch. `lookonce fetch --pin` writes the commit
    here."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention for padded batches and for generation; packed training always uses FlexAttention on a GPU."""


class DataSection(Section):
    """The records and images of the run."""

    train: Annotated[Paths, Field(min_length=1)]
    """Records files to train on: one path or a list, in any record format (see `format`)."""
    val: Paths = []
    """Records files for the validation loss, the exact match while training (`eval.every`), and the evaluation at the
    end of training if `eval.split` is val."""
    test: Paths = []
    """Records files for a final evaluation (`lookonce eval --split test`); nothing is learned or chosen from them."""
    image_root: UserPath | None = None
    """Folder that image paths in records are relative to, and must not lead out of. By default each records file's own
    folder, and absolute image paths are allowed."""
    format: FormatName | None = None
    """Record format of all records files: canonical, flat, llava, sharegpt, alpaca, messages, parts or openai. By
    default each file's format is recognised by its first record."""
    coerce_answers: bool = False
    """Read answers that are numbers or booleans as text, as JSON writes them (`3`, `true`). By default they are an
    error."""
    skip_unusable: bool = False
    """Leave out the records of images that are missing or could not be encoded, in training and in evaluation. By
    default such an image is an error, because a score without its records is of other questions."""


class CacheSection(Section):
    """The vision-feature cache."""

    dir: UserPath = Path("caches")
    """Folder of all caches. Each fingerprint has its own subfolder, so caches of several models can share it."""
    dtype: DtypeName = "bfloat16"
    """Storage type of the features, in which the tower also computes. fp8_e4m3 halves the size of bfloat16; the tower
    then computes in bfloat16."""
    backend: Backend = "pil"
    """Library that resizes images. The pixels of the two differ slightly, so each has its own cache."""
    min_pixels: Count | None = None
    """Smaller images are enlarged to this many pixels; by default the model's own limit."""
    max_pixels: Count | None = None
    """Larger images are shrunk to this many pixels; by default the model's own limit. An image has one token per
    32 x 32 pixels, so a lower limit means fewer tokens, a smaller cache and faster training."""
    shard_mb: Count = 2048
    """Planned size of a shard in megabytes. A killed worker loses at most its unfinished shard and up to two tower
    batches of the next one."""
    stage: StagePath | None = None
    """Folder into which `lookonce cache stage` copied the cache, for example $SLURM_TMPDIR. Training reads the copy if
    it is complete, and the original otherwise. Only here, a variable that is not set is no error: there is no copy
    then."""
    claim_s: Annotated[float, Field(gt=0)] = 180
    """Seconds without a heartbeat after which a process on another machine counts as dead, and its shard, cache or run
    folder is taken over. Must be longer than a network file system needs to show one machine what another wrote."""
    check: bool = True
    """Verify each image's checksum whenever its features are read."""


class LoraSection(Section):
    """The LoRA adapter."""

    rank: Count = 16
    """Rank of the LoRA matrices. A higher rank can learn more and has proportionally more weights to train."""
    alpha: Count = 32
    """LoRA scale: the adapter's output is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Fraction of the adapter's inputs that are randomly set to zero in training; 0 disables dropout."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (https://arxiv.org/abs/2312.03732)."""
    targets: list[str] | str = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Modules that get LoRA weights: a list of names or one regular expression, as in PEFT. Only modules of the
    language model are allowed."""
    modules_to_save: list[str] = []
    """Modules that are trained in full and saved with the adapter, for example embed_tokens."""


class BatchSection(Section):
    """How records become optimizer steps and forward passes."""

    mode: Literal["shared", "packed", "separate"] = "shared"
    """`shared`: all questions about an image share one pass over its tokens, several images per sequence. `packed`:
    each question has its own copy of the image, without padding. `separate`: each question is a padded row of a batch.
    All three train on the same steps with the same loss."""
    samples_per_step: Count = 16
    """Records (questions) per optimizer step: the effective batch size, over all forward passes and all GPUs."""
    tokens_per_pack: Count = 8192
    """Tokens of the longest pack in `shared` and `packed` mode, limited by GPU memory. Longer records are left out;
    otherwise loss and gradients do not depend on it."""
    questions_per_image: Count | None = None
    """At most this many questions about an image stay together when the order is shuffled. By default all of them; 1 is
    the usual random order."""
    samples_per_forward: Count = 4
    """Rows per forward pass in `separate` mode. Limited by GPU memory; loss and gradients do not depend on it."""
    max_tokens: Count = 4096
    """Records with more tokens are left out and counted; so are records that are longer than a pack."""
    order: Literal["random", "as_given"] = "random"
    """`random` shuffles by the seed in every epoch; `as_given` keeps the order of the records files."""
    loss: Literal["token", "sample"] = "token"
    """`token`: mean over all supervised tokens of a step. `sample`: mean over its samples, each with the mean of its
    tokens, so that long answers do not count more."""

    @property
    def has_packs(self) -> bool:
        """Whether packs go through the model, and not padded rows."""
        return self.mode != "separate"

    @property
    def longest_record(self) -> int:
        """Tokens of the longest record that is not left out."""
        return min(self.max_tokens, self.tokens_per_pack) if self.has_packs else self.max_tokens

    @property
    def limiting_key(self) -> str:
        """The key that sets `longest_record`."""
        return "batch.max_tokens" if self.longest_record == self.max_tokens else "batch.tokens_per_pack"


class TrainSection(Section):
    """The training."""

    epochs: Annotated[float, Field(gt=0)] = 3
    """How many times the training records are passed through; fractions are allowed. Ignored if `steps` is set."""
    steps: Count | None = None
    """Number of optimizer steps; by default it follows from `epochs`."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the frozen weights and of autocast. Trained weights are always float32."""
    tf32: bool = True
    """Use TensorFloat-32 for float32 matrix products on GPUs that have it (Ampere and later)."""
    optimizer: str = "adamw_torch_fused"
    """Any optimizer name of transformers' TrainingArguments."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate: reached after `warmup`, then lowered by `scheduler`."""
    scheduler: str = "cosine"
    """Learning rate schedule: a name of transformers' SchedulerType, for example linear, constant_with_warmup or
    cosine_with_min_lr."""
    scheduler_args: dict[str, SchedulerArgument] = {}
    """Arguments of the schedule, which some need: {min_lr_rate: 0.1} for cosine_with_min_lr, {num_decay_steps: 100} for
    warmup_stable_decay."""
    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Steps in which the learning rate rises from 0 to its peak; a value below 1 is a fraction of all steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the optimizer; 0 disables it."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to at most this norm; 0 disables clipping."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of storing them: less GPU memory, slower steps."""
    compile: bool = True
    """Compile the decoder layers with torch.compile, on a GPU only. Takes up to a minute, once for all pack lengths."""
    flex_attention: bool = True
    """Compute the attention over packs with FlexAttention, on a GPU only. Otherwise PyTorch's own attention gets a
    dense mask: slower, and its memory grows with the square of `tokens_per_pack`."""
    cuda_graphs: bool = True
    """Capture passes over packs as CUDA graphs, so that the GPU does not wait for the CPU to launch kernels. The graphs
    keep their memory until training ends. Not used with gradient checkpointing, fp16, fsdp or `separate` mode."""
    fsdp: bool = False
    """Shard the frozen weights over the GPUs of a distributed training (FSDP2), for models too large for one GPU."""
    prefetch: Count = 2
    """Number of forward passes whose batches are prepared ahead, while the steps before them run."""
    host_cache_gb: Annotated[float, Field(ge=0)] = 0
    """Gigabytes of host memory for the most recently used features; 0 reads them from disk every time."""
    logging_steps: Count = 10
    """Print and log the loss every this many steps."""
    eval_steps: Count | None = None
    """Measure the validation loss every this many steps; by default after each epoch."""
    save_steps: Count | None = None
    """Save a checkpoint every this many steps; by default after each epoch."""
    save_total_limit: Count = 2
    """Number of checkpoints to keep; older ones are deleted."""
    best: Literal["loss", "exact_match"] | None = None
    """The checkpoint that is the result: `loss` is the one with the lowest validation loss, `exact_match` the one with
    the most right answers (see `eval.every`). By default the last step."""
    seed: int = 42
    """Seed of the adapter's initial weights, the order of the records, and dropout."""
    track: Annotated[list[Tracker], BeforeValidator(as_list)] = []
    """Trackers that also get the log, the settings and the scores: tensorboard, wandb, mlflow; one or a list. Their
    files lie in the run folder; environment variables such as WANDB_PROJECT and MLFLOW_TRACKING_URI are followed.
    Needs: pip install 'lookonce[track]' for TensorBoard, 'lookonce[wandb]', 'lookonce[mlflow]'."""


class EvalSection(Section):
    """The evaluation: greedy answers, scored by exact match."""

    every: Literal["epoch"] | Count | None = None
    """Answer validation questions while training, after each `epoch` or every this many steps, and log the exact match.
    By default only after training."""
    max_questions: Count | None = None
    """At most this many questions each time that `eval.every` asks for, about images drawn by `train.seed`; by default
    all of `data.val`."""
    split: Literal["val", "test"] = "val"
    """Split whose questions are answered after training; `lookonce eval --split` chooses another."""
    max_new_tokens: Count = 32
    """Longest answer in tokens; longer ones are cut off."""
    candidates: Literal["training"] | UserPath | None = None
    """Known answers of which the likeliest is chosen too: `training` takes those of the training records to the same
    question text; a file (YAML or JSON) maps question texts to lists of answers. By default greedy answers alone."""
    engine: Literal["shared", "generate"] = "shared"
    """How answers are computed. `shared`: the tokens of an image once for all its questions, whose answers grow
    together. `generate`: transformers' own, each question with its own copy of the image. Both give the same answers,
    apart from rounding."""
    tokens_per_wave: Count | None = None
    """With `shared`, tokens of questions and answers that are in memory together, image tokens included; by default as
    many as the GPU has memory for, at most 65,536. A token of an 8B takes 147 kB. If there is too little memory, parts
    of a wave are answered one after another."""
    batch_size: Count = 16
    """With `generate`, questions that are answered together. Limited by GPU memory."""


class RunFile(Section):
    """A run: one training and its evaluation."""

    model: ModelSection
    data: DataSection
    output: UserPath
    """The run folder, into which everything is written; it must not hold another run or other files."""
    cache: CacheSection = CacheSection()
    lora: LoraSection = LoraSection()
    batch: BatchSection = BatchSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="after")
    def _measures_what_it_needs(self) -> RunFile:
        best, saved, every = self.train.best, self.train.save_steps, self.eval.every
        if every and not self.data.val:
            raise ValueError("eval.every answers validation questions and needs data.val")
        if best == "loss" and not self.data.val:
            raise ValueError("train.best: loss chooses by the validation loss and needs data.val")
        if best == "exact_match" and not every:
            raise ValueError("train.best: exact_match chooses by answers while training and needs eval.every")
        measured = self.train.eval_steps
        if best == "loss" and not (saved == measured or (saved and measured and saved % measured == 0)):
            raise ValueError(
                "train.best: loss needs train.save_steps to be a multiple of train.eval_steps, or neither of the two "
                f"(got train.save_steps={saved}, train.eval_steps={measured})"
            )
        is_saved = not saved if every == "epoch" else bool(every and saved and every % saved == 0)
        if best == "exact_match" and not is_saved:
            raise ValueError(
                "train.best: exact_match needs a checkpoint wherever answers are measured: eval.every is epoch, "
                f"without train.save_steps, or a multiple of train.save_steps (got {every}, train.save_steps={saved})"
            )
        return self

    def to_yaml(self) -> str:
        """All keys with their resolved values."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def read_run_file(path: Path, assignments: Iterable[str] = ()) -> RunFile:
    """Read a run file; `assignments` such as "train.epochs=5" replace its values.

    Raises:
        UsageError: the file is missing or not YAML, or keys or values are wrong; all mistakes are named at once.
    """
    expected = f"a mapping of sections ({', '.join(RunFile.model_fields)})"

    def assign(values: dict[str, Any]) -> None:
        for assignment in assignments:
            set_key(values, assignment)
        refuse_removed_keys(values)

    return read_settings(path, RunFile, f"run file {path}", "try experiments/sample.yaml", expected, assign)
