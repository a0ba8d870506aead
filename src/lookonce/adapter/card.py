"""The model card of a run: what it says of the run, its metadata by huggingface_hub, its text from card.md.jinja.

Design: nothing is estimated, and what is not recorded is left out or called unknown. The dataset and its licence are in
the report of `lookonce data prepare` beside the training records; for other records the user may name a known dataset.
The base model's name on the Hub is never guessed from a folder's: it is the run file's, or that of huggingface_hub's
own folder (`models--OWNER--NAME/snapshots/COMMIT`), or the user gives it.

The Hub reads the metadata: base model, dataset, and scores as a model index
(https://huggingface.co/docs/hub/model-cards), in which a baseline is a score of its own. The card names a licence of
the trained weights only if the user gives one: which licence the data allow is not for a program to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lookonce.datasets.prepare.definition import find_definition
from lookonce.errors import LookonceError, ModelError, UsageError
from lookonce.eval.scores.metric import name_of
from lookonce.eval.scores.metrics import NAMES, read_metrics
from lookonce.eval.statistics import MIN_CLUSTERS
from lookonce.hub import find_model, is_commit, is_hub_name, license_in
from lookonce.report.runs import Cost, ReportedRun, SplitFacts
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
    name: str
    commit: str | None
    """None if it is not known."""
    licence: str | None
    """The licence that its card on this machine names; None if there is none."""


def find_base_model(model: ModelSection, hub_name: str | None = None) -> BaseModel:
    """The base model of a run; `hub_name` is its name on the Hub, which may have a commit: owner/name@COMMIT.

    Raises:
        UsageError: the run names a folder and the name is not given, or it is malformed.
    """
    folder = Path(model.path).expanduser()
    if hub_name is not None:
        name, _, commit = hub_name.partition("@")
        if not is_hub_name(name) or (commit and not is_commit(commit)):
            raise UsageError(
                f"--base-model {hub_name!r} is not a model on the Hub; write OWNER/NAME or OWNER/NAME@COMMIT"
            )
        return BaseModel(name, commit or None, license_in(folder))
    if folder.is_dir():
        match = DOWNLOADED.search(folder.resolve().as_posix())
        if match is None:
            raise UsageError(
                f"the base model of the run is a folder, {folder}, and its name on the Hub is not known; "
                "name it: --base-model OWNER/NAME"
            )
        return BaseModel(f"{match['owner']}/{match['name']}", match["commit"], license_in(folder))
    if not is_hub_name(model.path):
        raise UsageError(
            f"the base model of the run, {model.path}, is neither a folder any more nor a name on the Hub; "
            "name it: --base-model OWNER/NAME"
        )
    try:
        local = find_model(model.path, model.revision, is_local=True)
    except ModelError:
        return BaseModel(model.path, model.revision if is_commit(model.revision) else None, None)
    return BaseModel(model.path, model.revision if is_commit(model.revision) else local.name, license_in(local))


UNKNOWN = "unknown"
SCORED = ("test", "val", HELD_OUT, "train")
"""The splits whose scores are on the card, in this order."""
COMMIT = re.compile(rf"[0-9a-f]{{40,64}}({DIRTY})?")
SHARED = {
    *("overall", "headline", "exact_match_interval", "baselines", "by_category", "by_stage"),
    *("metrics", "counts", "text_metrics"),
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
    libraries: Mapping[str, str]
    commit: str | None
    """The git commit of lookonce that trained the run, with `-dirty` if there were changes; None if it is unknown."""
    gpus: list[str]
    gpu_hours: float | None
    """Training and answering; None on a CPU, or if it is not recorded."""


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
        scores={
            split: {key: metrics[key] for key in metrics if key in SHARED}
            for split, metrics in known.items()
            if metrics
        },
        splits=reported.data.splits,
        systems=system_texts(run),
        trained=reported.trained,
        libraries={name: version for name, version in libraries.items() if version},
        commit=commit if isinstance(commit, str) and COMMIT.fullmatch(commit) else None,
        gpus=reported.environment.get("gpus") or [],
        gpu_hours=Cost.of(reported).gpu_hours,
    )


def find_dataset(name: str | None, prepared: Mapping[str, Any]) -> Dataset:
    """The dataset of that name; without a name, the one in the report of `lookonce data prepare`."""
    about = prepared if name is None else find_definition(name).model_dump()
    hub = (prepared.get("settings", {}).get("definition", {}) if name is None else about).get("hub") or {}
    return Dataset(
        title=about.get("title") or about.get("name") or UNKNOWN,
        hub_id=hub.get("id"),
        revision=prepared.get("source", {}).get("revision") if hub and name is None else None,
        licence=about.get("licence") or UNKNOWN,
        homepage=about.get("homepage") or "",
    )


def system_texts(run: RunFile) -> list[str] | None:
    """The different system texts of the training records; None if these cannot be read any more."""
    try:
        records = (record.with_system(run.data.system) for record in read_split(run, "train"))
        return list(dict.fromkeys(record.system for record in records if record.system))
    except (LookonceError, OSError):
        return None


# The text.

TEMPLATE = Path(__file__).with_name("card.md.jinja")
TASK = "visual-question-answering"
KIND = "image-text-to-text"
"""The Hub's name for models that take images and text and give text."""
DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def card(
    facts: CardFacts, repository: str, *, is_merged: bool, licence: str | None = None, revision: str | None = None
) -> str:
    """The card, as Markdown below a block of YAML; `licence` is a licence's identifier on the Hub, such as mit."""
    uploaded = _python_arguments(repository, revision)
    figures = [
        (split, figure)
        for split, scores in facts.scores.items()
        for figure in scores.get("metrics", {}).values()
        if figure["model"] is not None and figure["majority"] is not None
    ]
    constants: dict[str, Any] = {"UNKNOWN": UNKNOWN, "DIRTY": DIRTY, "NAMES": NAMES, "MIN_CLUSTERS": MIN_CLUSTERS}
    written = ModelCard.from_template(
        _metadata(facts, repository, is_merged, licence),
        template_path=str(TEMPLATE),
        title=repository.partition("/")[2],
        facts=facts,
        run=facts.run,
        is_merged=is_merged,
        licence=licence,
        figures=figures,
        measures=[*dict.fromkeys(name_of(scores["headline"]["metric"]) for scores in facts.scores.values())],
        name_of=name_of,
        uploaded=uploaded,
        loaded=uploaded if is_merged else _python_arguments(facts.base.name, facts.base.commit),
        dtype=DTYPES[facts.run.train.precision],
        count=count,
        duration=duration,
        repr=repr,
        **constants,
    )
    return f"{str(written).strip()}\n"


def _python_arguments(name: str, revision: str | None) -> str:
    """A repository as arguments of `from_pretrained`."""
    return json.dumps(name) + (f", revision={json.dumps(revision)}" if revision else "")


def _metadata(facts: CardFacts, repository: str, is_merged: bool, licence: str | None) -> ModelCardData:
    more: dict[str, Any] = {"base_model_relation": "finetune" if is_merged else "adapter"}
    return ModelCardData(
        base_model=facts.base.name,
        datasets=[facts.dataset.hub_id] if facts.dataset.hub_id else None,
        eval_results=[result for split in facts.scores for result in _results(facts, split)] or None,
        library_name="transformers" if is_merged else "peft",
        license=licence,
        model_name=repository.partition("/")[2],
        pipeline_tag=KIND,
        tags=["lora", TASK, "lookonce"],
        **more,
    )


def _results(facts: CardFacts, split: str) -> Iterator[EvalResult]:
    """The score of the model on a split, by the metric that counts, then that of each baseline."""
    scores, dataset = facts.scores[split], facts.dataset
    head, name_of_score = scores["headline"], name_of(scores["headline"]["metric"])
    measured = [(name_of_score, head["score"], {"confidence_interval_95": head["interval"]})]
    for key, baseline in scores.get("baselines", {}).items():
        higher = {"model_is_higher_by": baseline["difference"], "confidence_interval_95_of_that": baseline["interval"]}
        measured.append((f"{name_of_score} of the baseline: {NAMES.get(key, key)}", baseline["score"], higher))
    for name, value, more in measured:
        yield EvalResult(
            task_type=TASK,
            dataset_type=dataset.hub_id or dataset.title,
            dataset_name=dataset.title,
            dataset_split=split,
            dataset_revision=dataset.revision,
            metric_type=head["metric"],
            metric_value=value,
            metric_name=name,
            metric_args={"num_questions": head["num_questions"]} | more,
        )
