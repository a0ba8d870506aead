"""The sections of the run file: every key with its meaning, its default and what is allowed.

In paths, `~` and environment variables are expanded. A variable that is not set is an error, because a folder named
`$SCRATCH` would be made otherwise; so is an empty one, with which `$SCRATCH/caches` would be a folder at the root of
the disk. Two kinds of paths may keep a variable: `cache.stage`, whose variable is often set within jobs only, and paths
recorded by earlier versions.

An adapter on the Hub in `train.start_from` has the scheme of huggingface_hub's file system, because `runs/first` could
be a folder or a repository's name: `hf://owner/name@revision`
(https://huggingface.co/docs/huggingface_hub/guides/hf_file_system). It stays text, since a path would lose a slash.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from lookonce.cache.format import Backend, DtypeName
from lookonce.datasets.augment import Augment
from lookonce.datasets.balance import By
from lookonce.datasets.context import ContextForm
from lookonce.datasets.curriculum import Fold, Selection, StageOrder
from lookonce.datasets.formats.record import CONTROL_TOKEN, is_utf8
from lookonce.settings import (
    MAX_COUNT,
    ByContent,
    Free,
    FreeUnlessAnswersDecide,
    OnResume,
    Same,
    Section,
    Seed,
    as_list,
    number_from_text,
)

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""How many of something, such as steps."""
NumTokens = Annotated[int, Field(ge=1, le=1_000_000)]
"""Tokens that are in memory together; the models that are trained take at most 262,144."""
NumPixels = Annotated[int, Field(ge=1, le=100_000_000)]
"""Pixels of an image; the models' own limit is a sixth of it or less."""
Fraction = Annotated[float, Field(ge=0, lt=1)]


RECORDED = {"is_recorded": True}
"""The validation context of values that were recorded with a run, in which variables need not be set."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]+)\})", re.ASCII)

SECRET = re.compile("(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY)(_|$)", re.IGNORECASE)
"""What the names of variables with secrets have."""


def expand(path: str) -> str:
    """Expand `~` and environment variables; a variable that is not set, or is empty, stays as written.

    Raises:
        ValueError: there is no such user, or a variable is a secret.
    """
    if secret := next((name for name in map(_name, VARIABLE.finditer(path)) if SECRET.search(name)), None):
        raise ValueError(
            f"the environment variable {secret} is a secret, which messages about the path would show; use another name"
        )
    expanded = os.path.expanduser(VARIABLE.sub(lambda variable: os.environ.get(_name(variable)) or variable[0], path))
    if expanded.startswith("~"):
        raise ValueError(f"there is no home folder of {expanded.partition('/')[0]}; write the path in full")
    return expanded


def _expand_all(path: str, info: ValidationInfo) -> str:
    unset = [name for name in map(_name, VARIABLE.finditer(path)) if not os.environ.get(name)]
    if unset and info.context != RECORDED:
        if unset[0] in os.environ:
            raise ValueError(f"the environment variable {unset[0]} is empty; set it, or write the path without it")
        raise ValueError(f"the environment variable {unset[0]} is not set; set it, or write the path without it")
    return expand(path)


def _name(match: re.Match[str]) -> str:
    """The name of a variable that was found in a path."""
    return match[1] or match[2]


UserPath = Annotated[Path, AfterValidator(lambda path, info: Path(_expand_all(str(path), info)))]
"""A path whose variables must be set."""
StagePath = Annotated[Path, AfterValidator(lambda path: Path(expand(str(path))))]
"""A path that may not exist; a variable that is not set stays as written."""
ModelName = Annotated[str, Field(min_length=1), AfterValidator(_expand_all)]
"""A path, or the name of a model on the Hub."""
Paths = Annotated[list[UserPath], BeforeValidator(as_list)]
"""One path or a list of them."""


METRICS = {
    "exact_match": "exact match",
    "exact_match_lower": "exact match in lower case",
    "token_f1": "F1 of words",
    "token_recall": "recall of words",
    "label_f1": "F1 of labels",
    "label_set_match": "labels in any order",
    "point_inside": "points inside the box",
    "bleu": "BLEU",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "meteor": "METEOR",
    "chrf": "chrF",
}
"""The metrics that can count, by their keys, as they are named in texts."""
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""A metric of the user: `module:function`."""


def check_metric_name(name: str) -> str:
    """The name of a metric; raises ValueError if it is neither a key nor has the form of a function."""
    if name not in METRICS and not FUNCTION.fullmatch(name):
        raise ValueError(f"a metric is one of {', '.join(METRICS)}, or a function of yours, as module:function")
    return name


MetricName = Annotated[str, AfterValidator(check_metric_name)]


class ModelSection(Section):
    """The model that is fine-tuned."""

    path: ByContent[ModelName]
    """A model folder, or the name of a model on the Hugging Face Hub (owner/name)."""
    revision: ByContent[str | None] = None
    """Branch, tag or commit of a Hub model; by default its main branch. `lookonce fetch --pin` writes the commit
    here."""
    attention: Same[Literal["sdpa", "eager", "flash_attention_2"]] = "sdpa"
    """Attention for padded batches and for generation; packed training always uses FlexAttention on a GPU."""


FORMER = {"own": "predicted", "true": "reference", True: "reference", "exact_match": "metric"}
"""What earlier versions called the answers in prompts, as YAML reads it, and a value of `train.best`."""


def _current_name(value: Any, info: ValidationInfo) -> Any:
    """A former name in a recorded run as it is called now; elsewhere it is refused."""
    if not isinstance(value, str | bool) or value not in FORMER:
        return value
    if info.context != RECORDED:
        raise ValueError(f"`{str(value).lower()}` is now called `{FORMER[value]}`")
    return FORMER[value]


FORMER_NAMES = BeforeValidator(_current_name)


Answers = Annotated[
    Annotated[Literal["reference"], BeforeValidator(_current_name), Tag("reference")] | Annotated[Paths, Tag("files")],
    Discriminator(lambda value: "reference" if value in ("reference", "true", True) else "files"),
]


class ContextSection(ContextForm):
    """Answers to earlier questions in the prompts of later ones."""

    answers: ByContent[Answers] = "reference"
    """Which answers are used in training and in the validation loss: `reference` uses those of the records; or
    predictions files, one path or a list, with a model's answers to the same questions."""

    @property
    def prediction_files(self) -> list[Path]:
        """The predictions files; none if the answers are those of the records."""
        return [] if self.answers == "reference" else self.answers


def _is_system_text(text: str) -> str:
    if not text.strip() or not is_utf8(text):
        raise ValueError("must be text that is not empty, in UTF-8")
    if token := CONTROL_TOKEN.search(text):
        raise ValueError(f"contains {token[0]}, a special token of the model; remove it, since it would act as one")
    return text


class DataSection(Section):
    """The records and images of the run."""

    train: ByContent[Annotated[Paths, Field(min_length=1)]]
    """Records files to train on: one path or a list, in any record format; the first record tells which."""
    val: ByContent[Paths] = []
    """Records files for the validation loss, the scores while training (`eval.every`), and the evaluation at the end
    of training if `eval.split` is val."""
    test: ByContent[Paths] = []
    """Records files for a final evaluation (`lookonce eval --split test`); nothing is learned or chosen from them."""
    image_root: ByContent[UserPath | None] = None
    """Folder that image paths in records are relative to, and must not lead out of. By default each records file's own
    folder, and absolute image paths are allowed."""
    stage_map: ByContent[UserPath | None] = None
    """A stage map: a YAML file with the stage and category of each question text, such as
    datasets/kvasir-vqa.stages/reasoning.yaml. They become metadata of the records of all splits, in place of the
    records' own. A question that the map lacks is an error, unless the map has a `default`."""
    where: Same[Selection | None] = None
    """Which training records are used: those whose metadata has one of the given values in each of the given fields,
    such as {stage: [1, 2]}. With {share: 0.384}, alone or beside fields, it is that share of these records, drawn by
    `train.seed`; a larger share has all records of a smaller one. Other training records are ignored; they are counted
    and named. All validation and test records are kept."""
    replay: Same[Selection | None] = None
    """Which of the training records that `where` leaves out are used as well, in the same form: with
    {stage: 1, share: 0.1} a tenth of the records of stage 1. By default none."""
    held_out: Same[Fold | None] = None
    """Leave out the training records about a part of the images: with {fold: 1, of: 2} those about the first of two
    halves, drawn by `train.seed`. They are a split of their own, `held_out`, about images that the model never saw.
    Training ends with the answers to their questions and to those of `val`, which another run can name in
    `data.context.answers`. By default none."""
    context: ContextSection | None = None
    """Put the answers to questions of earlier stages into the prompts of later questions about the same images, as in
    {by: stage, order: [1, 2, 3]}; the keys are below. By default a prompt has only its own record's answers."""

    system: Same[Annotated[str, AfterValidator(_is_system_text)] | None] = None
    """The system text of all prompts: in training, evaluation, `lookonce predict` and `lookonce ask`, and on the model
    card. A record with a system text of its own keeps that. By default only such records have one."""
    enable_thinking: Same[bool | None] = None
    """Passed to the chat template, in training and for all answers. With `false` the template of Qwen3.5 writes an
    empty block `<think></think>` before each answer, which belongs to the prompt; without it, training refuses this
    template, because its prompts end inside the block. By default the template decides. If the template does not know
    the variable, the run is refused."""

    @model_validator(mode="after")
    def _replays_what_is_left_out(self) -> DataSection:
        if self.replay and not self.where:
            raise ValueError("`replay` selects from the records that `where` leaves out, and needs `where`")
        return self


class CacheSection(Section):
    """The vision-feature cache."""

    dir: Free[UserPath] = Path("caches")
    """Folder of all caches. Each fingerprint has its own subfolder, so caches of several models can share it."""
    dtype: Same[DtypeName] = "bfloat16"
    """Storage type of the features, in which the tower also computes. fp8_e4m3 halves the size of bfloat16; the tower
    then computes in bfloat16."""
    backend: Same[Backend] = "pil"
    """Library that resizes images. The pixels of the two differ slightly, so each has its own cache."""
    min_pixels: Same[NumPixels | None] = None
    """Smaller images are enlarged to this many pixels; by default the model's own limit."""
    max_pixels: Same[NumPixels | None] = None
    """Larger images are shrunk to this many pixels; by default the model's own limit. An image has one token per
    32 x 32 pixels (28 x 28 in Qwen2-VL and Qwen2.5-VL), so a lower limit means fewer tokens, a smaller cache and faster
    training."""
    shard_mb: Free[Annotated[int, Field(ge=1, le=1_000_000)]] = 2048
    """Planned size of a shard, a file of features, in megabytes. A killed worker loses at most its unfinished shard and
    up to two tower batches of the next one."""
    stage: Free[StagePath | None] = None
    """Folder into which `lookonce cache stage` copied the cache, for example $SLURM_TMPDIR. Training reads the copy if
    it is complete, and the original otherwise. Only here, a variable may be unset: then there is no copy."""
    augment: Same[Augment | None] = None
    """Train on changed copies of each image, made when the cache is built, as in {variants: 4, rotate: 10, brightness:
    0.2}; the keys are below. Validation, evaluations and answers use the images themselves."""
    claim_s: Free[Annotated[float, Field(ge=0.1, le=604_800)]] = 180
    """Seconds without a heartbeat after which a process on another machine counts as dead, and its shard, cache or run
    folder is taken over. Must be longer than a network file system needs to show one machine what another wrote."""


NAME = re.compile(r"[\w.]+")
SEVERAL_NAMES = re.compile(rf"{NAME.pattern}(\s*[\s,;]\s*{NAME.pattern})+")


def _is_one_name(value: Any) -> Any:
    if isinstance(value, str) and SEVERAL_NAMES.fullmatch(value.strip()):
        raise ValueError(f"write several names as a list: [{', '.join(NAME.findall(value))}]")
    return value


def _name_as_list(value: Any) -> Any:
    """The name of a module as a list; PEFT takes a text for an expression, which matches no module if it is a name."""
    return [value] if isinstance(value, str) and NAME.fullmatch(value) else _is_one_name(value)


class LoraSection(Section):
    """The LoRA adapter."""

    rank: Same[Annotated[int, Field(ge=1, le=8192)]] = 16
    """Rank of the LoRA matrices. A higher rank can learn more and has proportionally more weights to train."""
    alpha: Same[Annotated[int, Field(ge=1, le=1_000_000)]] = 32
    """LoRA scale: the adapter's output is multiplied by alpha / rank."""
    dropout: Same[Fraction] = 0.0
    """Fraction of the adapter's inputs that are randomly set to zero in training; 0 disables dropout."""
    rslora: Same[bool] = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (https://arxiv.org/abs/2312.03732)."""
    targets: Same[Annotated[list[str] | str, BeforeValidator(_name_as_list)]] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Modules that get LoRA weights: a name, a list of names, or one regular expression for whole names, as in PEFT.
    Only modules of the language model are allowed."""
    experts: Same[bool] = False
    """Give each expert of a mixture of experts its own LoRA weights. Needs `dropout: 0`. Training
    then keeps a second copy of all experts' weights, the sum of these and the adapter."""
    modules_to_save: Same[list[Annotated[str, BeforeValidator(_is_one_name)]]] = []
    """Modules that are trained in full and saved with the adapter, for example embed_tokens."""

    @model_validator(mode="after")
    def _experts_have_no_dropout(self) -> LoraSection:
        if self.experts and self.dropout:
            raise ValueError(f"experts: true needs dropout: 0, not {self.dropout}; set one of them")
        return self


Order = Annotated[
    Annotated[Literal["random", "as_given"], Tag("name")] | Annotated[StageOrder, Tag("mapping")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "mapping"),  # errors are about one kind alone
]


class BatchSection(Section):
    """How records become optimizer steps and forward passes."""

    mode: Same[Literal["shared", "packed", "separate"]] = "shared"
    """`shared`: all questions about an image share one pass over its tokens, several images per sequence. `packed`:
    each question has its own copy of the image, without padding. `separate`: each question is a padded row of a batch.
    All three train on the same steps with the same loss."""
    samples_per_step: Same[Annotated[int, Field(ge=1, le=1_000_000)]] = 16
    """Records (questions) per optimizer step: the effective batch size, over all forward passes and all GPUs."""
    tokens_per_pack: Same[NumTokens] = 8192
    """Tokens of the longest pack, which is a sequence of images with their questions, in `shared` and `packed` mode;
    limited by GPU memory. Longer records are left out; otherwise loss and gradients do not depend on it."""
    questions_per_image: Same[Count | None] = None
    """At most this many questions about an image stay together when the order is shuffled. By default all of them; 1 is
    the usual random order."""
    samples_per_forward: Same[Annotated[int, Field(ge=1, le=100_000)]] = 4
    """Rows per forward pass in `separate` mode, limited by GPU memory; and samples per micro-batch with
    `loss: micro_batch`. Otherwise loss and gradients do not depend on it."""
    max_tokens: Same[NumTokens] = 4096
    """Records with more tokens are left out and counted; so are records that are longer than a pack."""
    order: Same[Order] = "random"
    """`random` shuffles by the seed in every epoch. `as_given` keeps the order of the records files: each step has the
    next records, whatever their images. {by: stage, stages: [1, 2, 3]} trains in every epoch on all records whose
    metadata has stage 1, then on those of stage 2, then 3, each stage shuffled. Steps have their full size: one may
    hold the end of a stage and the beginning of the next."""
    loss: Same[Literal["token", "sample", "micro_batch"]] = "token"
    """`token`: mean over all supervised tokens of a step. `sample`: mean over its samples, each with the mean of its
    tokens, so that long answers do not count more. `micro_batch`: mean over micro-batches of `samples_per_forward`
    samples in the order of the step, each with the mean of its tokens, as transformers' Trainer computes it with
    gradient accumulation for most families of models."""
    balance: Same[By | None] = None
    """Give rare answers or categories as much of the loss as frequent ones. `answer`: all answers to a question text
    have the same total weight. `category`: all values of the metadata field `category` have. A record's weight
    multiplies its targets, and the loss of a step is divided by the weights in it. The validation loss has no weights.
    By default all records weigh the same."""

    @model_validator(mode="after")
    def _balanced_loss_has_weights(self) -> BatchSection:
        if self.balance and self.loss == "micro_batch":
            raise ValueError(
                f"balance: {self.balance} needs loss: token or sample; micro_batch is the loss of a Trainer without "
                "weights"
            )
        return self

    @property
    def has_packs(self) -> bool:
        """Whether packs go through the model, and not padded rows."""
        return self.mode != "separate"

    @property
    def stage_order(self) -> StageOrder | None:
        """The stages of an epoch; None if it has none."""
        return self.order if isinstance(self.order, StageOrder) else None

    @property
    def longest_record(self) -> int:
        """Tokens of the longest record that is not left out."""
        return min(self.max_tokens, self.tokens_per_pack) if self.has_packs else self.max_tokens

    @property
    def limiting_key(self) -> str:
        """The key that sets `longest_record`."""
        return "batch.max_tokens" if self.longest_record == self.max_tokens else "batch.tokens_per_pack"


SCHEME = "hf://"
FORM = re.compile(r"hf://(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^@\s]+))?")


class HubAdapter(NamedTuple):
    """An adapter on the Hub."""

    name: str
    """Owner and name of the repository."""
    revision: str | None
    """A branch, a tag or a commit; None for the newest."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}" + (f"@{self.revision}" if self.revision else "")


def hub_adapter(start: Path | str | None) -> HubAdapter | None:
    """The adapter on the Hub that a value of `train.start_from` names; None for a path."""
    match = FORM.fullmatch(start) if isinstance(start, str) else None
    return HubAdapter(match["name"], match["revision"]) if match else None


def _path_or_hub_adapter(value: Any, as_path: ValidatorFunctionWrapHandler) -> Any:
    if not (isinstance(value, str) and value.startswith(SCHEME)):
        return as_path(value)
    if hub_adapter(value) is None:
        raise ValueError(f"an adapter on the Hub is {SCHEME}OWNER/NAME@COMMIT (got {value})")
    return value


if TYPE_CHECKING:
    StartFrom = Path | str
else:
    StartFrom = Annotated[UserPath, WrapValidator(_path_or_hub_adapter), PlainSerializer(str, when_used="json")]


Argument = Annotated[int | float, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
SchedulerArgument = Annotated[bool | Argument | str, BeforeValidator(number_from_text)]
Frozen = Literal["precision", "fp8", "int8", "nf4"]
Checkpointing = Literal[False, True, "selective"]
UNQUANTISED = "precision"
"""The value of `frozen` for weights that are not quantised."""


class TrainSection(Section):
    """The training."""

    objective: Same[Literal["sft", "grpo"]] = "sft"
    """What is learned. `sft`: the answers of the records. `grpo`: to draw answers of higher rewards, as the section
    `grpo` says."""
    start_from: ByContent[StartFrom | None] = None
    """Another run, by its output folder or its run file; training starts from its adapter. Or an adapter that `lookonce
    adapter push` uploaded: `hf://owner/name@COMMIT`. The section `lora` of both must be the same apart from `dropout`.
    Only the weights are taken: optimizer and schedule are new, nothing is merged, and that run stays unchanged. By
    default a new adapter is trained."""
    epochs: Same[Annotated[float, Field(ge=0, le=1_000_000)]] = 3
    """How many times the training records are passed through; fractions are allowed. Ignored if `steps` is set. With 0
    nothing is trained: the adapter of `start_from` answers unchanged, with this run's other settings."""
    steps: Same[Count | None] = None
    """Number of optimizer steps; by default it follows from `epochs`."""
    precision: Same[Literal["bf16", "fp16", "fp32"]] = "bf16"
    """Precision of the frozen weights and of autocast. Trained weights are always float32. `bf16` and `fp16` use
    TensorFloat-32 for float32 matrix products on GPUs that have it (Ampere and later); `fp32` does not."""
    frozen: Same[Frozen] = "precision"
    """How the frozen weights of the decoder layers are kept. `precision`: as `precision` says. `fp8`: their products
    are computed in 8-bit floating point, which is faster on GPUs that can (Ada, Hopper and later). `int8` and `nf4`:
    rounded to 8 or 4 bits (QLoRA), which needs less GPU memory. Needs: pip install 'lookonce[qlora]'."""
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
    max_grad_norm: Same[Annotated[float, Field(ge=0, le=1_000_000)]] = 1.0
    """Gradients are scaled down to at most this norm; 0 disables clipping."""
    gradient_checkpointing: Same[Checkpointing] = False
    """Compute activations again in the backward pass instead of storing them: less GPU memory, slower steps.
    `selective`: those of each layer's MLP, half of what is stored. true: all, for the least memory. Losses and
    gradients are the same; with `lora.dropout` on a GPU, true draws other random numbers."""
    compile: Free[bool] = True
    """Compile the decoder layers with torch.compile, on a GPU only. Takes up to a minute, once for all pack lengths."""
    flex_attention: Free[bool] = True
    """Compute the attention over packs with FlexAttention, on a GPU only. Otherwise PyTorch's own attention gets a
    dense mask: slower, and its memory grows with the square of `tokens_per_pack`."""
    cuda_graphs: Free[bool] = True
    """Capture passes over packs as CUDA graphs, so that the GPU does not wait for the CPU to launch kernels. The graphs
    keep their memory until training ends. Not used with fp16, fsdp or `separate` mode, nor
    with gradient checkpointing if `compile` is false."""
    fsdp: Free[bool] = False
    """Shard the frozen weights over the GPUs of a distributed training (FSDP2), for models too large for one GPU."""
    logging_steps: Free[Count] = 10
    """Print and log the loss every this many steps."""
    eval_steps: Annotated[Count | None, OnResume("free", unless_best=("loss",))] = None
    """Measure the validation loss every this many steps; by default after each epoch."""
    save_steps: Annotated[Count | None, OnResume("free", unless_best=("loss", "metric"))] = None
    """Save a checkpoint every this many steps; by default after each epoch."""
    best: Same[Annotated[Literal["loss", "metric"] | None, FORMER_NAMES]] = None
    """The checkpoint that is the result: `loss` is the one with the lowest validation loss, `metric` the one whose
    answers score most by `eval.metric` (see `eval.every`). By default the last step."""
    patience: Same[Count | None] = None
    """End the training when this many measurements in a row, of what `best` names, were no better than the best one
    before them. Needs `best`. By default training ends with its last step."""
    seed: Same[Seed] = 42
    """Seed of the adapter's initial weights, the order of the records, dropout, and the share of `data.where`."""
    track: Free[list[Literal["tensorboard", "wandb", "mlflow"]]] = []
    """Trackers that also get the log: tensorboard, wandb, mlflow; one or a list. TensorBoard's files lie in the run
    folder; the others follow their environment variables, such as WANDB_PROJECT and MLFLOW_TRACKING_URI. Needs: pip
    install 'lookonce[track]' for TensorBoard, 'lookonce[wandb]', 'lookonce[mlflow]'."""

    @property
    def has_steps(self) -> bool:
        """Whether anything is trained."""
        return bool(self.steps or self.epochs)

    @model_validator(mode="after")
    def _can_be_trained(self) -> TrainSection:
        if self.fsdp and self.frozen != UNQUANTISED:
            raise ValueError(f"fsdp cannot shard quantised weights (got frozen={self.frozen}); remove one of the two")
        if not (self.has_steps or self.start_from):
            raise ValueError(
                "with `epochs: 0` and no `steps` nothing is trained, so `start_from` must name a trained run"
            )
        return self


class EvalSection(Section):
    """The evaluation: greedy answers, and the metric that scores them."""

    metric: FreeUnlessAnswersDecide[MetricName] = "exact_match"
    """The metric that counts, while training (`every`, `train.best`, `train.patience`) and in summary, reports,
    comparisons and studies: `exact_match`, `exact_match_lower`, `token_f1`, `token_recall`, `label_f1`,
    `label_set_match`, `point_inside`; with the extra `metrics` `bleu`, `rouge1`, `rouge2`, `rougeL`, `meteor`, `chrf`
    ([definitions](metrics.md)). Or a function of yours in a module that Python can import, as `module:function`
    ([its form](metrics.md#your-own-metric)). Exact match is always shown too."""
    every: FreeUnlessAnswersDecide[Literal["epoch"] | Count | None] = None
    """Answer validation questions while training, after each `epoch` or every this many steps, and log the exact match
    and the score by `metric`. By default only after training."""
    max_questions: FreeUnlessAnswersDecide[Count | None] = None
    """At most this many questions each time that `eval.every` asks for, about images drawn by `train.seed`; by default
    all of `data.val`."""
    split: Free[Literal["val", "test"]] = "val"
    """Split whose questions are answered after training; `lookonce eval --split` chooses another."""
    turns: FreeUnlessAnswersDecide[Annotated[Literal["predicted", "reference"], FORMER_NAMES]] = "predicted"
    """In records of several turns, which answers a later question follows: those that the model `predicted`, as when it
    is used, or those of the record, its `reference`. A predicted answer that is empty or cut off is shown as
    "(not answered)"."""
    staged: FreeUnlessAnswersDecide[Annotated[Literal["predicted", "reference", "none"], FORMER_NAMES]] = "predicted"
    """With `data.context`, which answers to earlier questions are in the prompts: those that the model `predicted`, for
    which the questions are answered stage by stage; those of the records, the `reference`; or `none`."""
    max_new_tokens: FreeUnlessAnswersDecide[Annotated[int, Field(ge=1, le=100_000)]] = 32
    """Longest answer in tokens; longer ones are cut off."""
    engine: Free[Literal["shared", "generate"]] = "shared"
    """How answers are computed. `shared`: the tokens of an image once for all its questions, whose answers grow
    together. `generate`: transformers' own, each question with its own copy of the image. Both give the same answers,
    apart from rounding."""
    tokens_per_batch: Free[NumTokens | None] = None
    """With `shared`, tokens of questions and answers that are in memory together, image tokens included; by default as
    many as the GPU has memory for, at most 65,536. A token of an 8B takes 147 kB. In models with linear attention there
    is at most one state for each 64 of them. If there is too little memory, parts of a batch are answered one after
    another."""
