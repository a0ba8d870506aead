"""The run file: one YAML page that says what a run is.

Every key a run can have is below, with its meaning, its default and what is allowed. Unknown keys are refused, so that
a misspelt one can not be silently ignored. Paths are relative to the working directory. What was resolved is saved
with the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lookonce.cache.constants import Backend, DtypeName
from lookonce.datasets.formats.registry import FormName
from lookonce.errors import UsageError
from lookonce.settings import read_settings


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | Path) else value


UserPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expandvars(path)).expanduser())]
"""`~` and environment variables are filled in; a variable that is not set stays as it is written."""
Paths = Annotated[list[UserPath], BeforeValidator(_as_list)]
"""One path or a list of them."""
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


REMOVED = {"train.compare_steps": "compare after training with: lookonce bench step RUN.yaml"}
"""Keys of earlier versions, each with what takes its place."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    path: Annotated[str, Field(min_length=1)]
    """A checkpoint folder, or a model on the Hugging Face Hub (owner/name)."""
    revision: str | None = None
    """Of a Hub model: branch, tag or commit."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Of padded rows and of answers; training on packs has its own."""


class DataSection(Section):
    train: Annotated[Paths, Field(min_length=1)]
    """Files of records, in any of the forms of datasets/forms."""
    val: Paths = []
    test: Paths = []
    image_root: UserPath | None = None
    """What image paths are relative to, and may not lead out of; by default each records file's own folder, and
    absolute paths are themselves."""
    format: FormName | None = None
    """Of all records files: canonical, flat, llava, sharegpt, alpaca, messages, parts or openai; by default each file's
    is known by its first record."""


class CacheSection(Section):
    dir: UserPath = Path("caches")
    """Holds one folder a fingerprint; caches of several models live side by side."""
    dtype: DtypeName = "bfloat16"
    """What is stored, and what the tower computes in; fp8_e4m3 halves bfloat16, in which the tower then computes."""
    backend: Backend = "pil"
    """Of the image processor."""
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    """Image size limits; by default the model's own. Fewer pixels are fewer tokens: 32 x 32 pixels are one."""
    shard_mb: Count = 2048
    """Planned size of a shard; what a killed worker loses at most, but for two forwards of the next."""
    stage: UserPath | None = None
    """Where `lookonce cache stage` has put a copy, for example $SLURM_TMPDIR; training reads it from there if it is
    complete."""
    claim_s: Annotated[float, Field(gt=0)] = 180
    """A worker that was not heard of for so long is dead, and its shard is taken over; longer than a network
    filesystem may take to show one machine what another wrote."""
    check: bool = True
    """Compare each image's checksum when it is read."""


class LoraSection(Section):
    rank: Count = 16
    alpha: Count = 32
    dropout: Fraction = 0.0
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (https://arxiv.org/abs/2312.03732)."""
    targets: list[str] | str = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Module names or one regular expression, as PEFT takes them; of the language model only."""
    modules_to_save: list[str] = []
    """Modules trained whole and saved with the adapter, for example embed_tokens."""


class BatchSection(Section):
    mode: Literal["shared", "packed", "separate"] = "shared"
    """`shared`: all questions about an image share one pass over its tokens, several images a sequence. `packed`: each
    question has its own copy of the image, without padding. `separate`: each question is a padded row of a batch."""
    samples_per_step: Count = 16
    """Questions an optimizer step: the effective batch, over all forward passes and all GPUs."""
    tokens_per_pack: Count = 8192
    """Longest sequence of `shared` and `packed`: what fits the GPU."""
    questions_per_image: Count | None = None
    """So many questions about an image stay together in the order; by default all, 1 is the classic random order."""
    samples_per_forward: Count = 4
    """Rows that go through the model together in `separate`."""
    max_tokens: Count = 4096
    """Longer records are left out, and counted; so are those longer than a pack."""
    order: Literal["random", "as_given"] = "random"
    """Shuffled by the seed every epoch, or the order of the records files."""
    loss: Literal["token", "sample"] = "token"
    """The mean over all supervised tokens of a step, or over its samples of each one's mean."""

    @property
    def has_packs(self) -> bool:
        """Sequences and not padded rows go through the model."""
        return self.mode != "separate"

    @property
    def longest_record(self) -> int:
        """In tokens; longer ones are left out."""
        return min(self.max_tokens, self.tokens_per_pack) if self.has_packs else self.max_tokens


class TrainSection(Section):
    epochs: Annotated[float, Field(gt=0)] = 3
    steps: Count | None = None
    """Optimizer steps; if given, epochs do not count."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the frozen weights and of autocast; what is trained is float32 always."""
    tf32: bool = True
    """TensorFloat-32 for float32 products, on GPUs that have it."""
    optimizer: str = "adamw_torch_fused"
    """Any optimizer name of transformers' TrainingArguments."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    scheduler: str = "cosine"
    """Any scheduler name of transformers."""
    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Steps, or below 1 a fraction of all steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """0 does not clip."""
    gradient_checkpointing: bool = False
    compile: bool = True
    """Compile the decoder layers, on a GPU; takes up to a minute, once for packs of all lengths."""
    cuda_graphs: bool = True
    """Record passes over packs as CUDA graphs, so that the GPU does not wait for the CPU to launch its kernels. Their
    memory is theirs until training ends. Not with gradient checkpointing, fp16, fsdp or rows."""
    fsdp: bool = False
    """Spread the frozen weights over the GPUs of a training in several processes, for models too large for one."""
    prefetch: Count = 2
    """Forward passes that are read ahead."""
    host_cache_gb: Annotated[float, Field(ge=0)] = 0
    """Features used last that are kept in memory."""
    logging_steps: Count = 10
    eval_steps: Count | None = None
    """Measure the validation loss every so many steps; by default after each epoch."""
    save_steps: Count | None = None
    """Write a checkpoint every so many steps; by default after each epoch."""
    save_total_limit: Count = 2
    load_best_model_at_end: bool = False
    """End with the checkpoint of the lowest validation loss instead of the last one."""
    seed: int = 42
    tensorboard: bool = False

    @model_validator(mode="after")
    def _best_needs_saved(self) -> TrainSection:
        by_epoch = [self.eval_steps is None, self.save_steps is None]
        in_step = all(by_epoch) or (self.eval_steps and self.save_steps and self.save_steps % self.eval_steps == 0)
        if self.load_best_model_at_end and not in_step:
            raise ValueError(
                "load_best_model_at_end needs save_steps to be a multiple of eval_steps, or neither of the two "
                f"(got eval_steps={self.eval_steps}, save_steps={self.save_steps})"
            )
        return self


class EvalSection(Section):
    split: Literal["val", "test"] = "val"
    max_new_tokens: Count = 32
    batch_size: Count = 16


class RunFile(Section):
    """A whole run."""

    model: ModelSection
    data: DataSection
    output: UserPath
    """The run's folder; it may not hold another run."""
    cache: CacheSection = CacheSection()
    lora: LoraSection = LoraSection()
    batch: BatchSection = BatchSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="before")
    @classmethod
    def _sections_may_be_empty(cls, values: Any) -> Any:
        """`train:` with all its keys commented out is None to YAML."""
        if not isinstance(values, dict):
            return values
        return {name: {} if value is None else value for name, value in values.items()}

    @model_validator(mode="after")
    def _best_needs_validation(self) -> RunFile:
        if self.train.load_best_model_at_end and not self.data.val:
            raise ValueError("train.load_best_model_at_end chooses by the validation loss and needs data.val")
        return self

    def to_yaml(self) -> str:
        """All keys with their resolved values."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def read_run_file(path: Path, assignments: Iterable[str] = ()) -> RunFile:
    """Read a run file; `assignments` are "train.epochs=5" and go over what it says.

    Raises:
        UsageError: it is missing, no YAML, or a key or value is wrong; all that is wrong is named at once.
    """
    expected = f"a mapping of sections ({', '.join(RunFile.model_fields)})"

    def assign(values: dict[str, Any]) -> None:
        for assignment in assignments:
            _assign(values, assignment)
        _refuse_removed_keys(values)

    return read_settings(path, RunFile, f"run file {path}", "try experiments/sample.yaml", expected, assign)


def without_removed_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Recorded values without the keys that no longer exist: runs of earlier versions stay readable."""
    sections = {name.partition(".")[0] for name in REMOVED}
    return {
        name: {key: inner for key, inner in value.items() if f"{name}.{key}" not in REMOVED}
        if name in sections and isinstance(value, dict)
        else value
        for name, value in values.items()
    }


def _refuse_removed_keys(values: dict[str, Any]) -> None:
    for name, instead in REMOVED.items():
        section, _, key = name.partition(".")
        if isinstance(values.get(section), dict) and key in values[section]:
            raise UsageError(f"`{name}` no longer exists; remove it and {instead}")


def _assign(values: dict[str, Any], assignment: str) -> None:
    name, sign, text = assignment.partition("=")
    *sections, key = name.strip().split(".")
    if not sign or not key:
        raise UsageError(f"--set {assignment!r} is not of the form section.key=value, for example train.epochs=5")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise UsageError(f"--set {assignment!r}: {section} is no section")
    try:
        values[key] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"--set {assignment!r}: {text!r} is not a YAML value") from None
