"""The run file: one YAML page that says what a run is.

Every key is in sections.py. Here are the sections together, and the checks that span several. Paths are relative to the
working directory, as in a shell, and stay as written in messages. Only the record in the run folder has absolute paths,
which are not compared when a run is resumed, so data that was moved makes no other run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache, reduce
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from pydantic import BaseModel, ValidationInfo, model_validator

from lookonce.run.grpo import GrpoSection, refused
from lookonce.run.sections import (
    RECORDED,
    VARIABLE,
    BatchSection,
    CacheSection,
    DataSection,
    EvalSection,
    LoraSection,
    ModelSection,
    TrainSection,
    UserPath,
)
from lookonce.settings import Free, OnResume, Section, checked, load_values, set_key

REMOVED = {
    "cache.check": "checksums are always compared; leave it out",
    "data.coerce_answers": "let this write numbers as text: lookonce data convert RECORDS OUT --coerce-answers",
    "data.context.dropout": "every training record has its context; leave it out",
    "data.format": "the first record tells the format; if it cannot: lookonce data convert RECORDS OUT --format FORMAT",
    "data.skip_unusable": "remove these records, which this lists: lookonce data audit RECORDS --decode",
    "eval.batch_size": "`generate` answers 16 questions together; leave it out",
    "eval.frozen": "answers are computed with the weights of `train.frozen`, of fp8 with unrounded ones; leave it out",
    "eval.tokens_per_wave": "it is `eval.tokens_per_batch` now",
    "train.compile_cache": "compiled code is in `compiler` in `cache.dir`; leave it out",
    "train.host_cache_gb": "the page cache keeps features in memory; leave it out, or copy the cache: cache.stage",
    "train.prefetch": "two batches are made ahead; leave it out",
    "train.save_total_limit": "two checkpoints are kept; leave it out",
    "train.tf32": "TensorFloat-32 is used where the GPU has it, unless `train.precision` is fp32; leave it out",
    "train.weight_decay": "the adapter's weights do not decay; leave it out, or use `lora.dropout`",
}
"""Keys of earlier versions, and what to write instead."""
ONLY = {"data.coerce_answers": False, "data.context.dropout": 0, "data.format": None, "data.skip_unusable": False}
ONLY |= {"train.weight_decay": 0, "train.tf32": True}
"""The values of such keys with which a recorded run can still be read; of the others any value."""


class RunFile(Section):
    """A run: one training and its evaluation."""

    removed: ClassVar = REMOVED
    model: ModelSection
    data: DataSection
    output: Free[UserPath]
    """The run folder, into which everything is written; it must not hold another run or other files."""
    cache: CacheSection = CacheSection()
    lora: LoraSection = LoraSection()
    batch: BatchSection = BatchSection()
    train: TrainSection = TrainSection()
    grpo: GrpoSection = GrpoSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="before")
    @classmethod
    def _reads_earlier_records(cls, values: Any, info: ValidationInfo) -> Any:
        """Leave keys that were removed out of a recorded run, unless they say what is not done any more."""
        if info.context != RECORDED:
            return values
        values = deepcopy(values)
        for name in REMOVED:
            *sections, key = name.split(".")
            section = reduce(lambda inner, part: inner.get(part) if isinstance(inner, dict) else None, sections, values)
            if isinstance(section, dict) and key in section and section[key] == ONLY.get(name, section[key]):
                del section[key]
        return values

    @model_validator(mode="after")
    def _start_and_best_are_consistent(self) -> RunFile:
        start = self.train.start_from
        if isinstance(start, Path) and start.absolute() == self.output.absolute():
            raise ValueError(f"train.start_from is the run's own output, {self.output}; name another run")
        best, saved, every = self.train.best, self.train.save_steps, self.eval.every
        if every and not self.data.val:
            raise ValueError("eval.every answers validation questions and needs data.val")
        if best == "loss" and not self.data.val:
            raise ValueError("train.best: loss chooses by the validation loss and needs data.val")
        if best == "metric" and not every:
            raise ValueError("train.best: metric chooses by answers while training and needs eval.every")
        if self.train.patience and not best:
            raise ValueError("train.patience needs train.best, which names what must get better: loss or metric")
        measured = self.train.eval_steps
        if best == "loss" and not (saved == measured or (saved and measured and saved % measured == 0)):
            raise ValueError(
                "train.best: loss needs train.save_steps to be a multiple of train.eval_steps, or neither of the two "
                f"(got train.save_steps={saved}, train.eval_steps={measured})"
            )
        is_saved = not saved if every == "epoch" else bool(every and saved and every % saved == 0)
        if best == "metric" and not is_saved:
            raise ValueError(
                "train.best: metric needs a checkpoint wherever answers are measured: eval.every is epoch, "
                f"without train.save_steps, or a multiple of train.save_steps (got {every}, train.save_steps={saved})"
            )
        return self

    @model_validator(mode="after")
    def _can_learn_from_rewards(self) -> RunFile:
        if self.train.objective == "grpo" and (reason := refused(self.batch, self.lora.dropout, self.train.fsdp)):
            raise ValueError(f"train.objective: grpo {reason}")
        return self

    @property
    def keys_that_may_differ(self) -> set[str]:
        """The keys, such as "train.compile", whose values may be others when this run is resumed.

        The compiler and the attention are among them although they round differently: a fault of theirs must not end a
        run. What keys name by a path or on the Hub is compared by its content.
        """
        free = {name for name, key in keys().items() if key.may_differ in ("content", "free")}
        deciding = {name for name, key in keys().items() if self.train.best in key.unless_best}
        return free - deciding | ({"train.epochs"} if self.train.steps else set())

    @property
    def measure(self) -> str:
        """What `train.best` and `train.patience` look at, as the log names it: loss, exact_match, or score."""
        if self.train.best != "metric":
            return "loss"
        return "exact_match" if self.eval.metric == "exact_match" else "score"

    @property
    def compile_cache(self) -> Path:
        return self.cache.dir / "compiler"

    def to_yaml(self) -> str:
        """All keys with their resolved values."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


@cache
def keys(section: type[BaseModel] = RunFile, prefix: str = "") -> dict[str, OnResume]:
    """What each key says of a resumed training, by its name: {"model.path": ..., "train.epochs": ...}."""
    on_resume: dict[str, OnResume] = {}
    for name, field in section.model_fields.items():
        stated = [note for note in field.metadata if isinstance(note, OnResume)]
        if stated:
            [on_resume[prefix + name]] = stated
            continue
        kinds = (kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type))
        [inner] = (kind for kind in kinds if issubclass(kind, Section))
        on_resume |= keys(inner, f"{prefix}{name}.")
    return on_resume


def read_run_file(path: Path | str, assignments: Iterable[str] = ()) -> RunFile:
    """Read a run file; `assignments` such as "train.epochs=5" replace its values.

    Raises:
        UsageError: the file is missing or not YAML, or keys or values are wrong; all mistakes are named at once.
    """
    form = f"a mapping of sections ({', '.join(RunFile.model_fields)})"
    values = load_values(Path(path), f"run file {path}", "lookonce init writes one", form)
    for assignment in assignments:
        set_key(values, assignment)
    return checked(values, RunFile, f"run file {path}")


def with_absolute_paths(run: RunFile) -> RunFile:
    """The same run, with paths that do not depend on the working directory."""
    model = {"path": str(Path(run.model.path).absolute())} if Path(run.model.path).is_dir() else {}
    return with_changes(run, lambda path: path if VARIABLE.search(str(path)) else path.absolute(), model)


def with_changes(run: RunFile, change: Callable[[Path], Path], model: dict[str, Any]) -> RunFile:
    """The run with each path changed, and with other values in its section `model`."""

    def inside(value: Any) -> Any:
        if isinstance(value, Section):
            return value.model_copy(update={name: inside(inner) for name, inner in value})
        if isinstance(value, list):
            return [inside(inner) for inner in value]
        return change(value) if isinstance(value, Path) else value

    return inside(run.model_copy(update={"model": run.model.model_copy(update=model)}))  # type: ignore[no-any-return]
