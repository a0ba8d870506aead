"""How far the runs of a study are, read from their folders; and variants whose answers are those of other variants.

What was done is recorded in the run folders alone. So a study continues after any crash, and runs that were trained or
evaluated by other commands count as well. A run whose record differs from the study file, or that needs such a run, is
*outdated*: it is never mixed with the others, but refused or trained again. The predictions of a variant with a `route`
are made again whenever they are needed, so they never lag behind those that they are taken from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from lookonce.errors import UsageError
from lookonce.eval.join import Label, Run, check_labels, find_predictions, route
from lookonce.eval.scores.metric import EXACT, Headline, common_metric, name_of
from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import label, read_predictions, write_predictions
from lookonce.files import write_json
from lookonce.report.contexts import other_contexts
from lookonce.run.folder import RECORD, RunClaim, RunFolder
from lookonce.run.open import answers_identity
from lookonce.run.records import read_splits
from lookonce.run.start_adapter import start_identity
from lookonce.settings import Difference
from lookonce.status import TrainingPhase, find_scores, find_training
from lookonce.study.file import StudyFile, StudyRun, expand, read_study
from lookonce.text import count, listed, shell, table

Runs = Mapping[str, StudyRun]
PATIENCE_S = 30.0
"""How long to wait for another process that writes the same page or answers, which takes a few seconds."""
WORDS = {"reference": "reference", "none": "no"}
"""Which answers to earlier questions stand in the prompts, as they are named in a sentence."""
INPUTS = {"records": "records", "language_model": "weights of the model"}
"""Inputs that a run folder has the hashes of, as they are named in a sentence."""


@dataclass(frozen=True)
class RunState:
    training: TrainingPhase
    score: Headline | None
    """The score of the split that the study evaluates; None if it is not evaluated."""
    is_complete: bool
    """Whether it is trained, and evaluated if it has questions."""
    not_asked: list[str]
    """With whose answers to earlier questions it is not asked yet beside its own evaluation: `reference`, `none`."""


def read_state(run: StudyRun) -> RunState:
    folder, split = run.folder, run.settings.eval.split
    scores = find_scores(folder, split)
    is_evaluated = split in scores or not getattr(run.settings.data, split)
    training = find_training(folder, run.settings.cache.claim_s)
    not_asked = [kind for kind in other_contexts(run.settings) if f"{split}-{kind}" not in scores]
    is_complete = folder.is_finished and is_evaluated
    return RunState(training, scores.get(split), is_complete, not_asked)


def find_outdated(runs: Runs) -> dict[str, str]:
    """Why runs do not belong to the study file any more, by name; those that need such a run are among them."""
    outdated: dict[str, str] = {}
    for run in in_order(runs):
        if not (run.folder.holds_work and (run.folder.folder / RECORD).exists()):
            continue
        if reason := _outdated_need(run, runs, outdated):
            outdated[run.name] = reason
        elif changed := changed_settings(run):
            outdated[run.name] = listed([f"{name}: now {now!r}, trained with {then!r}" for name, now, then in changed])
    return outdated


def changed_settings(run: StudyRun) -> list[Difference]:
    """How the record in a run's folder differs from the study file."""
    of_others = start_identity(run.settings, run.folder.recorded_inputs()) | answers_identity(run.settings.data.context)
    return run.folder.differences(run.settings, of_others)


def _outdated_need(run: StudyRun, runs: Runs, outdated: Collection[str]) -> str:
    """Why a run that has begun is outdated by those that it needs; empty if it is not."""
    for name in run.needs:
        how = f"starts from {name}, which" if name == run.start else f"has the answers of {name}, which"
        if name in outdated:
            return f"{how} is outdated"
        if not runs[name].folder.trained.exists():
            return f"{how} is not trained any more"
    return ""


def find_mixed(runs: Runs) -> list[str]:
    """A sentence for runs that name the same records or the same model, and were trained on different ones.

    Only their hashes in the run folders are read, so it is not known which of the runs are as the files are now.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for run in runs.values():
        data, model, inputs = run.settings.data, run.settings.model, run.folder.recorded_inputs()
        seed = run.seed if data.where or data.replay or data.held_out else None  # which draws a part of the records
        records = f"{seed} {data.model_dump_json(exclude={'test'})}"
        for what, key in (("records", records), ("language_model", model.model_dump_json())):
            if what in inputs:
                found.setdefault((what, key), {}).setdefault(str(inputs[what]), []).append(run.name)
    return [
        f"not trained on the same {INPUTS[what]}, although they name the same files: {'; '.join(map(listed, groups))}"
        for (what, _), groups in ((key, [*by_hash.values()]) for key, by_hash in found.items())
        if len(groups) > 1
    ]


def in_order(runs: Runs) -> list[StudyRun]:
    """The runs, each after those that it needs."""
    return [runs[name] for name in TopologicalSorter({run.name: run.needs for run in runs.values()}).static_order()]


def refuse_outdated(runs: Runs, again: bool, study: Path) -> set[str]:
    """The outdated runs; if they may not be trained `again`, raises UsageError, which says what has changed."""
    outdated = find_outdated(runs)
    if outdated and not again:
        lines = [f"  {name}: {reason}" for name, reason in outdated.items()]
        raise UsageError(
            "\n".join(["the study has changed since these runs were trained:", *lines])
            + "\nundo the change, choose another `output`, or train them again (what they hold is moved away): "
            + shell("lookonce", "study", "run", study, "--again")
        )
    return set(outdated)


@dataclass(frozen=True)
class RoutedRun:
    """The answers of several runs with one seed, each to the questions with its label."""

    name: str
    variant: str
    seed: int
    by: Label
    runs: Mapping[str, StudyRun]
    """The run for each value of the label."""
    folder: RunFolder

    @property
    def split(self) -> str:
        return next(iter(self.runs.values())).settings.eval.split

    def check(self) -> None:
        """Check that there is a run for each question of the split; raises LookonceError if there is none for some."""
        records = read_splits(next(iter(self.runs.values())).settings)[self.split]
        labels = [label(record.metadata.get(self.by)) for record in records for _ in record.turns]
        try:
            check_labels(labels, list(self.runs), self.by)
        except UsageError as error:
            raise UsageError(f"variant {self.variant}: {error}") from None

    def write(self) -> Run:
        """Write predictions and scores, and return the answers; all of its runs must have answered.

        Raises:
            UsageError: questions have a label without a run, or the runs answered different questions.
        """
        with RunClaim(self.folder.folder, "lookonce study") as owner:
            owner.take(patience_s=PATIENCE_S)
            answers = {}
            for value, run in self.runs.items():
                predictions = read_predictions(find_predictions(run.folder, self.split))
                answers[value] = Run(run.variant, predictions, run.variant, run.seed)
            metric = common_metric({run.name: run.settings.eval.metric for run in self.runs.values()})
            evaluation = Evaluation.of(route(answers, self.by), metric=metric)
            write_predictions(self.folder.predictions(self.split), evaluation.predictions)
            write_json(self.folder.metrics(self.split), evaluation.to_json())
        return Run(self.variant, evaluation.predictions, self.variant, self.seed, metric)

    def score(self) -> Headline | None:
        return find_scores(self.folder, self.split).get(self.split)

    def to_json(self) -> dict[str, Any]:
        runs = {value: run.name for value, run in self.runs.items()}
        values = {"run": self.name, "variant": self.variant, "seed": self.seed, "by": self.by, "runs": runs}
        return values | {"folder": self.folder.folder}


def routed_runs(study: StudyFile, runs: Mapping[str, StudyRun]) -> dict[str, RoutedRun]:
    """The variants of a study with a `route`, with each seed, by name."""
    routed = {}
    for seed in study.seeds:
        for variant, section in study.routes.items():
            parts = {value: runs[f"{other}-{seed}"] for value, other in section.variants.items()}
            name = f"{variant}-{seed}"
            routed[name] = RoutedRun(name, variant, seed, section.by, parts, RunFolder(study.output / name))
    return routed


def write_routed(routed: Iterable[RoutedRun]) -> None:
    """Write the answers of those whose runs are complete."""
    for routed_run in routed:
        if all(read_state(part).is_complete for part in routed_run.runs.values()):
            routed_run.write()


@dataclass(frozen=True)
class StudyStatus:
    runs: Mapping[str, StudyRun]
    states: Mapping[str, RunState]
    outdated: Mapping[str, str]
    """Why runs do not belong to the study file any more."""
    routed: Mapping[str, RoutedRun]
    """The variants whose answers are those of other variants."""

    @classmethod
    def read(cls, path: Path) -> StudyStatus:
        """The state now; raises LookonceError if the study file, a run file or the record of a run is wrong."""
        study = read_study(path)
        runs = expand(study)
        states = {name: read_state(one) for name, one in runs.items()}
        return cls(runs, states, find_outdated(runs), routed_runs(study, runs))

    def is_current(self, name: str) -> bool:
        """Whether a run is complete, and of this study file."""
        return self.states[name].is_complete and name not in self.outdated

    def has_answered(self, name: str) -> bool:
        """Whether a run is complete, of this study file, and evaluated; of a routed one, whether its runs are."""
        if name in self.routed:
            return all(self.has_answered(run.name) for run in self.routed[name].runs.values())
        return self.is_current(name) and self.states[name].score is not None

    @property
    def num_complete(self) -> int:
        return sum(map(self.is_current, self.runs))

    def to_json(self) -> dict[str, Any]:
        values = [
            {"run": name, "variant": run.variant, "seed": run.seed, "folder": run.settings.output}
            | {"starts_from": run.start, "answers_of": run.answers_of}
            | asdict(self.states[name])
            | {"outdated": self.outdated.get(name)}
            for name, run in self.runs.items()
        ]
        scored = [(routed_run.to_json(), self._score(routed_run)) for routed_run in self.routed.values()]
        routed = [value | {"score": asdict(score) if score else None} for value, score in scored]
        return {"runs": values, "routed": routed, "mixed": find_mixed(self.runs)}

    def _score(self, routed: RoutedRun) -> Headline | None:
        return routed.score() if self.has_answered(routed.name) else None

    def text(self) -> str:
        runs = [_row(name, state, name in self.outdated) for name, state in self.states.items()]
        routed = [(name, "routed", "", *_figures(self._score(run))) for name, run in self.routed.items()]
        measures = dict.fromkeys(state.score.name for state in self.states.values() if state.score)
        header = ("run", "state", "steps", " or ".join(measures) or name_of(EXACT), "majority")
        lines = [table(header, [*runs, *routed])]
        lines += [f"{name} is outdated: {reason}" for name, reason in self.outdated.items()]
        for name, state in self.states.items():
            if state.not_asked and self.is_current(name):
                kinds = " and ".join(WORDS[kind] for kind in state.not_asked)
                lines.append(f"{name} is not evaluated with {kinds} answers to earlier questions yet")
        lines += find_mixed(self.runs)
        return "\n".join([*lines, "", f"{self.num_complete} of {count(len(self.runs), 'run')} complete"])


def _row(name: str, state: RunState, is_outdated: bool) -> tuple[str, ...]:
    training = state.training
    steps = f"{training.num_steps:,}" if training.num_steps else ""
    steps = steps if training.state in ("trained", "finished") or not steps else f"{training.step:,} of {steps}"
    return name, "outdated" if is_outdated else training.state, steps, *_figures(state.score)


def _figures(score: Headline | None) -> tuple[str, str]:
    return (f"{score.score:.1%}", f"{score.majority:.1%}") if score else ("", "")
