"""The model card of a run: its metadata by huggingface_hub, its text from card.md.jinja.

Design: the Hub reads the metadata: base model, dataset, and scores as a model index
(https://huggingface.co/docs/hub/model-cards). A baseline is a score of its own there, because the index has no place
for one beside another. The card names a licence of the trained weights only if the user gives one: which licence the
data allow is not for a program to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lookonce.adapter.upload.facts import UNKNOWN, CardFacts, Dataset
from lookonce.adapter.upload.usage import prompt, usage
from lookonce.eval.scores.metrics import NAMES
from lookonce.eval.statistics import MIN_CLUSTERS
from lookonce.text import count, duration
from lookonce.version import DIRTY

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
