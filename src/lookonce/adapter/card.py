"""The model card of a run: what it says of the run, its metadata by huggingface_hub, its text from card.md.jinja.

Design: nothing is estimated, and what is not recorded is left out or called unknown. The dataset and its licence are in
the report of `lookonce data prepare` beside the training records; for other records the user may name a known dataset.
The base model has its name on the Hub, which is all that other people can use. That name is never guessed from a
folder's: it is the run file's, or that of huggingface_hub's own folder (`models--OWNER--NAME/snapshots/COMMIT`), or the
user gives it. The commit is known only of what was downloaded.

The Hub reads the metadata: base model, dataset, and scores as a model index
(https://huggingface.co/docs/hub/model-cards). A baseline is a score of its own there, because the index has no place
for one beside another. The card names a licence of the trained weights only if the user gives one: which licence the
data allow is not for a program to say. Its code asks the model with the settings that its answers depend on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lookonce.datasets.prepare.definition import find_definition
from lookonce.errors import LookonceError, ModelError, UsageError
from lookonce.eval.scores.metrics import NAMES, read_metrics
from lookonce.eval.statistics import MIN_CLUSTERS
from lookonce.hub import find_model, is_commit, is_hub_name, license_of_model
from lookonce.report.runs import ReportedRun, SplitFacts
from lookonce.report.training import Cost
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.records import HELD_OUT, read_split
from lookonce.run.sections import ModelSection
from lookonce.text import count, duration
from lookonce.version import DIRTY

DOWNLOADED = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
"""The end of the path of a model that huggingface_hub has downloaded."""


@dataclass(frozen=True)
class BaseModel:
    """A model on the Hub."""

    name: str
    """Owner and name."""
    commit: str | None
    """None if it is not known."""
    licence: str | None
    """The licence that its card on this machine names; None if there is none."""


def find_base_model(model: ModelSection, given: str | None = None) -> BaseModel:
    """The base model of a run; `given` is its name on the Hub, which may have a commit: owner/name@COMMIT.

    Raises:
        UsageError: the run names a folder and the name is not given, or it is malformed.
    """
    folder = Path(model.path).expanduser()
    if given is not None:
        name, _, revision = given.partition("@")
        if not is_hub_name(name) or (revision and not is_commit(revision)):
            raise UsageError(f"--base-model {given!r} is not a model on the Hub; write OWNER/NAME or OWNER/NAME@COMMIT")
        return BaseModel(name, revision or None, license_of_model(folder) if folder.is_dir() else None)
    if folder.is_dir():
        return _downloaded(folder)
    local = _on_this_machine(model)
    commit = model.revision if is_commit(model.revision) else (local.name if local else None)
    return BaseModel(model.path, commit, license_of_model(local) if local else None)


def _downloaded(folder: Path) -> BaseModel:
    found = DOWNLOADED.search(folder.resolve().as_posix())
    if found is None:
        raise UsageError(
            f"the base model of the run is a folder, {folder}, and its name on the Hub is not known; "
            "name it: --base-model OWNER/NAME"
        )
    return BaseModel(f"{found['owner']}/{found['name']}", found["commit"], license_of_model(folder))


def _on_this_machine(model: ModelSection) -> Path | None:
    if not is_hub_name(model.path):
        raise UsageError(
            f"the base model of the run, {model.path}, is neither a folder any more nor a name on the Hub; "
            "name it: --base-model OWNER/NAME"
        )
    try:
        return find_model(model.path, model.revision, is_local=True)
    except ModelError:
        return None


UNKNOWN = "unknown"
SCORED = ("test", "val", HELD_OUT, "train")
"""The splits whose scores are on the card, in this order."""
COMMIT = re.compile(rf"[0-9a-f]{{40,64}}({DIRTY})?")
SHARED = {
    *("overall", "exact_match_interval", "baselines", "by_category", "by_stage", "metrics", "counts", "text_metrics"),
}
"""Keys of an evaluation that are uploaded; names in other groups may be texts of records, or names of places."""


@dataclass(frozen=True)
class Dataset:
    """What a run was trained on."""

    title: str
    hub_id: str | None
    """Owner and name on the Hub; None if it is not there."""
    revision: str | None
    """The commit that was prepared; None if it is not recorded."""
    licence: str
    homepage: str

    @property
    def forbids_commercial_use(self) -> bool:
        return "NC" in self.licence.upper().replace("-", " ").split()


@dataclass(frozen=True)
class CardFacts:
    """A run, in what other people should know of it."""

    run: RunFile
    base: BaseModel
    dataset: Dataset
    scores: Mapping[str, Mapping[str, Any]]
    """The evaluation of each split as JSON, without groups whose names are texts of records."""
    splits: Mapping[str, SplitFacts]
    """Empty if the records cannot be read any more."""
    systems: list[str] | None
    """The system texts of the training records; None if they cannot be read any more."""
    trained: Mapping[str, Any]
    """The figures of the training."""
    libraries: Mapping[str, str]
    """Versions by name."""
    commit: str | None
    """The git commit of lookonce that trained the run, with `-dirty` if there were changes; None if it is unknown."""
    gpus: list[str]
    gpu_hours: float | None
    """Training and answering; None on a CPU, or if it is not recorded."""

    @property
    def was_trained_elsewhere(self) -> bool:
        return bool(self.trained.get("elsewhere"))


def facts_of(folder: RunFolder, base: BaseModel, dataset: str | None = None) -> CardFacts:
    """The facts of a run; `dataset` is a known dataset, or a YAML file that defines one.

    Raises:
        UsageError: there is no such dataset.
        RunFolderError: the folder holds no run.
    """
    run = folder.read_run()
    reported = ReportedRun(folder.folder.name, run.eval.split, None, folder, run)
    libraries, commit = reported.environment.get("libraries") or {}, reported.environment.get("commit")
    known = {split: read_metrics(folder, split) for split in SCORED}
    return CardFacts(
        run=run,
        base=base,
        dataset=find_dataset(dataset, reported.data.prepared),
        scores={split: {key: one[key] for key in one if key in SHARED} for split, one in known.items() if one},
        splits=reported.data.splits,
        systems=_systems(run),
        trained=reported.trained,
        libraries={name: version for name, version in libraries.items() if version},
        commit=commit if isinstance(commit, str) and COMMIT.fullmatch(commit) else None,
        gpus=reported.environment.get("gpus") or [],
        gpu_hours=Cost.of(reported).gpu_hours,
    )


def find_dataset(name: str | None, prepared: Mapping[str, Any]) -> Dataset:
    """The dataset of that name; without a name, the one in the report of `lookonce data prepare`."""
    if name is None:
        definition = prepared.get("settings", {}).get("definition", {})
        hub = definition.get("hub") or {}
        return Dataset(
            title=prepared.get("title") or prepared.get("name") or UNKNOWN,
            hub_id=hub.get("id"),
            revision=prepared.get("source", {}).get("revision") if hub else None,
            licence=prepared.get("licence") or UNKNOWN,
            homepage=prepared.get("homepage") or "",
        )
    known = find_definition(name)
    hub_id = known.hub.id if known.hub else None
    return Dataset(known.title or known.name, hub_id, None, known.licence, known.homepage)


def _systems(run: RunFile) -> list[str] | None:
    try:
        return list(dict.fromkeys(record.system for record in read_split(run, "train") if record.system))
    except (LookonceError, OSError):
        return None


WITH_ADAPTER = """\
import torch
from peft import PeftModel
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained({base}, dtype={dtype}, device_map="auto")
model = PeftModel.from_pretrained(model, {repository}{of_repository})
processor = AutoProcessor.from_pretrained({base})
processor.image_processor = AutoImageProcessor.from_pretrained({base}, backend="{backend}")  # as in training
"""
MERGED = """\
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained({repository}{of_repository}, dtype={dtype}, device_map="auto")
processor = AutoProcessor.from_pretrained({repository}{of_repository})
processor.image_processor = AutoImageProcessor.from_pretrained(
    {repository}{of_repository}, backend="{backend}"  # as in training
)
"""
ASK = """\
messages = [
{system}    {{
        "role": "user",
        "content": [{{"type": "image", "url": "image.jpg"}}, {{"type": "text", "text": "QUESTION"}}],
    }},
]
inputs = processor.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
).to(model.device)
output = model.generate(**inputs, do_sample=False, max_new_tokens={max_new_tokens})
print(processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])"""
DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def usage(facts: CardFacts, repository: str, revision: str | None, *, is_merged: bool) -> str:
    """Python code that asks the uploaded model a question, with stock transformers and PEFT."""
    run = facts.run
    of_base = f", revision={json.dumps(facts.base.commit)}" if facts.base.commit else ""
    head = (MERGED if is_merged else WITH_ADAPTER).format(
        base=f"{json.dumps(facts.base.name)}{of_base}",
        repository=json.dumps(repository),
        of_repository=f", revision={json.dumps(revision)}" if revision else "",
        dtype=DTYPES[run.train.precision],
        backend=run.cache.backend,
    )
    return head + _pixels(facts) + "\n" + _ask(facts)


def _pixels(facts: CardFacts) -> str:
    """The image sizes that the features were made with, where they differ from the published ones."""
    limits = {"shortest_edge": facts.run.cache.min_pixels, "longest_edge": facts.run.cache.max_pixels}
    lines = [f'processor.image_processor.size["{key}"] = {value}  # pixels' for key, value in limits.items() if value]
    return "".join(f"{line}\n" for line in lines)


def _ask(facts: CardFacts) -> str:
    system = facts.systems[0] if facts.systems and len(facts.systems) == 1 else None
    content = f'    {{"role": "system", "content": [{{"type": "text", "text": {system!r}}}]}},\n' if system else ""
    return ASK.format(system=content, max_new_tokens=facts.run.eval.max_new_tokens)


def prompt(facts: CardFacts) -> str:
    """What else the prompts of the training had, in a sentence or two."""
    run, said = facts.run, ["The prompt is that of the model's own chat template: the image, then the question."]
    if facts.systems is None:
        said.append("The training records cannot be read any more, so their system text is not known.")
    elif len(facts.systems) > 1:
        said.append(f"The training records have {len(facts.systems)} different system texts, before the image.")
    elif facts.systems:
        said.append("All training records have this system text.")
    if run.data.context:
        said.append("The training prompts also had answers to earlier questions about the image (`data.context`).")
    return " ".join(said)


TEMPLATE = Path(__file__).with_name("card.md.jinja")
TASK = "visual-question-answering"
KIND = "image-text-to-text"
"""The Hub's name for models that take images and text and give text."""


def card(
    facts: CardFacts, repository: str, *, is_merged: bool, licence: str | None = None, revision: str | None = None
) -> str:
    """The card, as Markdown below a block of YAML; `licence` is a licence's identifier on the Hub, such as mit."""
    data = _metadata(facts, repository, is_merged, licence)
    kind = "The model with the adapter merged into it" if is_merged else "A LoRA adapter"
    base = f"[{facts.base.name}](https://huggingface.co/{facts.base.name})"
    written = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=repository.partition("/")[2],
        what=f"{kind} of {base}",
        is_from_elsewhere=facts.was_trained_elsewhere,
        dataset=None if facts.dataset.title == UNKNOWN else _linked(facts.dataset),
        code=usage(facts, repository, revision, is_merged=is_merged),
        prompt=prompt(facts),
        scores="\n".join(_scores(facts.scores)),
        figures="\n".join(_figures(facts.scores)),
        made="\n".join(f"- {line}" for line in _made(facts)),
        licences="\n".join(f"- {line}" for line in _licences(facts, licence)),
        limits="\n".join(f"- {line}" for line in _limits(facts, is_merged)),
    )
    return f"{str(written).strip()}\n"


# Metadata.


def _metadata(facts: CardFacts, repository: str, is_merged: bool, licence: str | None) -> ModelCardData:
    more: dict[str, Any] = {"base_model_relation": "finetune" if is_merged else "adapter"}
    return ModelCardData(
        base_model=facts.base.name,
        datasets=[facts.dataset.hub_id] if facts.dataset.hub_id else None,
        eval_results=[one for split in facts.scores for one in _results(facts, split)] or None,
        library_name="transformers" if is_merged else "peft",
        license=licence,
        model_name=repository.partition("/")[2],
        pipeline_tag=KIND,
        tags=["lora", TASK, "lookonce"],
        **more,
    )


def _results(facts: CardFacts, split: str) -> Iterator[EvalResult]:
    """The exact match of the model on a split, then that of each baseline."""
    scores, dataset = facts.scores[split], facts.dataset
    of_split: dict[str, Any] = {
        "task_type": TASK,
        "dataset_type": dataset.hub_id or dataset.title,
        "dataset_name": dataset.title,
        "dataset_split": split,
        "dataset_revision": dataset.revision,
        "metric_type": "exact_match",
    }
    asked = {"num_questions": scores["overall"]["num_questions"]}
    interval = {"confidence_interval_95": scores.get("exact_match_interval")}
    yield EvalResult(
        **of_split,
        metric_value=scores["overall"]["exact_match"],
        metric_name="exact match",
        metric_args=asked | interval,
    )
    for key, one in scores.get("baselines", {}).items():
        higher = {"model_is_higher_by": one["difference"], "confidence_interval_95_of_that": one["interval"]}
        yield EvalResult(
            **of_split,
            metric_value=one["exact_match"],
            metric_name=f"exact match of the baseline: {NAMES.get(key, key)}",
            metric_args=asked | higher,
        )


# Text.


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]


def _percent(ends: Sequence[float] | None) -> str:
    return f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}" if ends else "none"


def _scores(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table of the model and its baselines on each split."""
    lines = []
    for split, one in scores.items():
        overall = one["overall"]
        right, interval = f"{overall['exact_match']:.1%}", _percent(one.get("exact_match_interval"))
        lines.append([split, "this model", f"{overall['num_questions']:,}", right, interval, ""])
        for key, other in one.get("baselines", {}).items():
            gain = f"{100 * other['difference']:+.1f} ({_percent(other['interval'])})"
            lines.append([split, NAMES.get(key, key), "", f"{other['exact_match']:.1%}", "", gain])
    header = ("split", "", "questions", "exact match", "interval", "this model is higher by")
    return _table(header, lines) if lines else []


def _figures(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table of all other figures."""
    lines = [
        [split, figure["name"], f"{figure['num_questions']:,}", f"{figure['model']:.3f}", f"{figure['majority']:.3f}"]
        for split, one in scores.items()
        for figure in one.get("metrics", {}).values()
        if figure["model"] is not None and figure["majority"] is not None
    ]
    return _table(("split", "figure", "questions", "this model", "majority"), lines) if lines else []


def _made(facts: CardFacts) -> Iterator[str]:
    run, base = facts.run, facts.base
    yield f"Base model: {base.name}, {f'commit {base.commit}' if base.commit else 'at a commit that is not recorded'}"
    if facts.splits:
        sizes = {
            split: f"{count(one.num_questions, 'question')} about {count(one.num_images, 'image')}"
            for split, one in facts.splits.items()
        }
        yield f"Records: {'; '.join(f'{split}: {size}' for split, size in sizes.items())}"
    targets = run.lora.targets if isinstance(run.lora.targets, str) else ", ".join(run.lora.targets)
    yield f"LoRA: rank {run.lora.rank}, alpha {run.lora.alpha}, in {targets} of the language model"
    if facts.was_trained_elsewhere:
        yield "The vision tower is unchanged"
        yield "Training: by another program than `lookonce train`, whose steps and settings are not recorded"
        return
    yield "The vision tower is unchanged: its features were computed once and read from a cache"
    steps = count(facts.trained["num_steps"], "step")
    yield f"Training: {steps} of {count(run.batch.samples_per_step, 'sample')}, seed {run.train.seed}"
    if run.train.start_from:
        yield "The training started with the adapter of another run"
    if facts.gpu_hours is not None:
        since = facts.trained.get("first_step")
        part = f", since step {since:,}, from which it was resumed" if since else ""
        yield f"{facts.gpu_hours:.2f} GPU hours for training and answering on {len(facts.gpus)} x {facts.gpus[0]}{part}"
    elif facts.trained.get("seconds"):
        yield f"Training took {duration(facts.trained['seconds'])} without a GPU"
    if facts.libraries:
        yield "Versions: " + ", ".join(f"{name} {version}" for name, version in facts.libraries.items())
    if facts.commit:
        changed = ", with changes that were not committed" if facts.commit.endswith(DIRTY) else ""
        yield f"Trained with lookonce at the git commit {facts.commit.removesuffix(DIRTY)}{changed}"


def _linked(dataset: Dataset) -> str:
    return f"[{dataset.title}]({dataset.homepage})" if dataset.homepage else dataset.title


def _licences(facts: CardFacts, licence: str | None) -> Iterator[str]:
    dataset = facts.dataset
    at = f", commit {dataset.revision}" if dataset.revision else ""
    yield f"Dataset: {_linked(dataset)}{at}. Licence: {dataset.licence}"
    if dataset.licence == UNKNOWN:
        yield "The licence of the dataset is not known. Check it before you use or share this model."
    else:
        only = " It allows no commercial use of the data." if dataset.forbids_commercial_use else ""
        yield f"This licence may bind a model that was trained on the data.{only} Read it before use or sharing."
    yield f"Base model: {facts.base.licence or UNKNOWN + ', see its card'}. Its licence applies to this model too."
    yield f"Licence of the trained weights: {licence or 'none was chosen'}."


def _limits(facts: CardFacts, is_merged: bool) -> Iterator[str]:
    """What the scores do not show, and what answers depend on."""
    run = facts.run
    if not facts.scores:
        yield "Nothing is known of the quality of the answers."
    else:
        yield (
            "The scores are of questions and images like those of the training. Other devices, places and phrasings "
            "were not measured."
        )
        yield "An interval holds the chance of the images, not that of training."
    if any(one.get("exact_match_interval") is None for one in facts.scores.values()):
        yield f"A score without an interval is of fewer than {MIN_CLUSTERS} images."
    if "val" in facts.scores:
        yield "val is not a final test: settings may have been chosen by it."
    if run.train.frozen != "precision":
        yield f"Trained on rounded weights (train.frozen: {run.train.frozen}); with others answers may differ."
    if is_merged:
        yield "Merging rounds the weights, so single answers may differ from those of the adapter."
    yield (
        "Answers may be wrong and sound certain. This model was not tested for decisions about people, such as "
        "clinical ones."
    )
