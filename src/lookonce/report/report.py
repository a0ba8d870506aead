"""The report of one or several runs: their numbers as JSON, and an HTML page of them.

Design: each part gives numbers, which are its JSON, and templates/report.html.jinja shows them. So every number of the
page is in the JSON. A part of which nothing is known has no heading. It costs two seconds for 9,000 questions about 975
images, 0.8 of them to import matplotlib and to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookonce import page
from lookonce.errors import UsageError
from lookonce.eval.compare import FEW_IMAGES, compare, to_json
from lookonce.eval.scores.metric import EXACT, common_metric
from lookonce.eval.scores.metrics import BASELINES, NAMES
from lookonce.eval.scores.prediction import GROUPINGS
from lookonce.eval.statistics import MIN_CLUSTERS, Interval
from lookonce.files import write_text
from lookonce.page import Line, Panel
from lookonce.report.answers import answers, drawn, errors, pictures
from lookonce.report.contexts import HEADER as CONTEXTS_HEADER
from lookonce.report.contexts import ContextScores, context_cells, context_scores
from lookonce.report.runs import Cost, DataFacts, ReportedRun, open_runs, overlap
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.log_file import OF_REWARDS, Curve, Curves, Rewards, smoothed
from lookonce.run.sections import RECORDED
from lookonce.settings import flatten
from lookonce.text import count, duration, listed, shell, shown, size
from lookonce.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TOLD = 3
"""The top of the page has the scores of this many runs, and the sentences of this many runs or pairs."""


@dataclass(frozen=True)
class Report:
    runs: Sequence[ReportedRun]
    numbers: dict[str, Any]
    """The numbers of each part by its key, as JSON; None if nothing is known."""
    contexts: Sequence[ContextScores]

    @classmethod
    def of(cls, runs: Sequence[ReportedRun], *, with_first_only: bool = False, metric: str | None = None) -> Report:
        """Make all parts; with several runs, compare all with all or `with_first_only`.

        What counts is `metric`, by default the metric of the runs.

        Raises:
            UsageError: the runs answered different questions, or have different metrics and none is named.
        """
        metric = metric or common_metric({run.name: run.answers.metric for run in runs if run.answers})
        runs = [replace(run, answers=replace(run.answers, metric=metric)) if run.answers else run for run in runs]
        compared = comparison(runs, with_first_only)  # first, because the others take runs to have the same questions
        contexts = context_scores(runs)
        has_context = any(run.has_context for run in runs)
        numbers = {
            "verdict": {"runs": [_verdict(run) for run in runs]},
            "comparison": compared,
            **({"contexts": [asdict(scores) for scores in contexts]} if has_context else {}),
            "groups": {run.name: _groups(run) for run in runs if run.scores} or None,
            "metrics": {run.name: _metrics(run) for run in runs if run.metrics.get("metrics")} or None,
            "curves": curves(runs),
            "drawn": drawn(runs),
            "answers": answers(runs),
            "errors": errors(runs),
            "cost": cost(runs),
            "settings": settings(runs),
            "data": {run.name: _data(run) for run in runs if run.settings} or None,
            "provenance": provenance(runs),
        }
        return cls(runs, numbers, contexts)

    def to_json(self) -> dict[str, Any]:
        return self.numbers

    def sentences(self) -> list[str]:
        """How the runs compare; without a comparison, how each is scored."""
        compared = self.numbers["comparison"]
        if not compared:
            return [run_sentence(run) for run in self.runs]
        return [pair["sentence"] for pair in compared["pairs"]]

    def to_page(self, template: str = "report.html.jinja", **more: Any) -> str:
        """The whole page as text, by this template or one that extends it with `more` values."""
        names, json = [run.name for run in self.runs], self.numbers
        shown_settings = json["settings"] or {"settings": {}, "differing": [], "defaults": None}
        defaults = {"default value": shown_settings["defaults"]} if shown_settings["defaults"] else {}
        scored = [run for run in json["verdict"]["runs"] if "baselines" in run]
        metrics = json["metrics"] or {}
        counts = [values["counts"] or {} for values in metrics.values()]
        libraries = [values["text_metrics"] or "" for values in metrics.values()]
        conditions = [(run, key) for run, values in metrics.items() for key in values["baselines"]]
        values = {
            "title": f"Report of {listed(names)}",
            "lead": " ".join(self.sentences()[:MAX_TOLD]),
            "footer": f"{page.MADE_BY}, version {__version__}. Its --json has the same numbers.",
            "named": _tiles(scored),
            "measure": scored[0]["measure"] if scored else "",
            "is_exact": all(run["metric"] == EXACT for run in scored),
            "names": names,
            "json": json,
            "looks": merged([(run.name, _image_sentence(run)) for run in self.runs if run.scores], len(names)),
            "said": merged(_record_sentences(self.runs, json["data"] or {}), len(names)),
            "conditions": conditions,
            "beside": [NAMES[key] + (f", {run}" if len(metrics) > 1 else "") for run, key in conditions],
            "metric_names": {key: name for run in reversed(metrics.values()) for key, name in run["metrics"].items()},
            "not_installed": next(filter(lambda text: "pip" in text, libraries), ""),
            "counted": {key: name for key, name in COUNTS.items() if any(run.get(key) is not None for run in counts)},
            "curves": [page.to_svg(plot, f"{name} of {listed(names)}") for name, plot in self.plots().items()],
            "rewarded": {name: of_run["rewards"] for name, of_run in (json["cost"] or {}).items() if of_run["rewards"]},
            "contexts": [(scores, context_cells(scores)) for scores in self.contexts],
            "contexts_header": CONTEXTS_HEADER,
            "picture_of": pictures([*(json["answers"] or []), *(json["drawn"] or [])]),
            "cost_lines": cost_lines(json["cost"] or {}),
            "settings": _lines(shown_settings["settings"], page.setting),
            "differing": _lines(shown_settings["settings"] | defaults, page.setting, shown_settings["differing"]),
            "facts": _lines(json["provenance"]["facts"], lambda text: shown(text or "", 120)),
            "splits": _splits(self.runs),
            "GROUPINGS": GROUPINGS,
            "NAMES": NAMES,
            "DISTANCES": DISTANCES,
        }
        return page.render(template, **values | more)

    def plots(self) -> dict[str, Figure]:
        """The curves of the runs, a plot for each figure."""
        return {panel.name: page.curves(panel, "step") for panel in _panels(_logged(self.runs))}


def _tiles(scored: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    tiles = [(run["measure"] if len(scored) == 1 else run["name"], f"{run['score']:.1%}") for run in scored]
    for run in scored[:1]:
        tiles[MAX_TOLD:] = [("majority baseline", f"{run['majority']:.1%}")]
        tiles += [("questions", f"{run['num_questions']:,}"), ("images", f"{run['num_images']:,}")]
    return tiles


def _lines(
    by_run: Mapping[str, Mapping[str, Any]], show: Callable[[Any], str], keys: Iterable[str] | None = None
) -> list[list[str]]:
    """A line for each key, by default all keys, with a cell for each run."""
    keys = dict.fromkeys(key for values in by_run.values() for key in values) if keys is None else keys
    return [[key, *(show(values.get(key)) for values in by_run.values())] for key in keys]


def check_replaces_page(path: Path) -> None:
    """Raise UsageError if a page written there would replace anything but a page of this module."""
    content = path.read_bytes() if path.is_file() else b""
    is_page = content.startswith(b"<!doctype html>") and page.MADE_BY.encode() in content
    if path.exists() and not is_page:
        raise UsageError(f"{path} exists and is not a page of lookonce report; name another file with -o, or remove it")


PLOT = b"Matplotlib pdf backend"
"""What each plot has in it."""


def write_plots(figures: Mapping[str, Figure], beside: Path) -> list[Path]:
    """Write plots as PDF beside a page, named after it; returns the paths. Raises UsageError if one is another file."""
    paths = [beside.with_name(f"{beside.stem}-{name.replace(' ', '-')}.pdf") for name in figures]
    for path in filter(Path.exists, paths):
        if not path.is_file() or PLOT not in path.read_bytes():
            raise UsageError(
                f"{path} exists and is not a plot of lookonce report; name another page with -o, or remove it"
            )
    for path, figure in zip(paths, figures.values(), strict=True):
        page.write_pdf(figure, path)
    return paths


def report_training(folder: RunFolder, summary: dict[str, Any], data: DataFacts) -> Path:
    """Write the report of a training that has just ended, from what it knows, into its run folder; returns the path."""
    runs = [replace(run, known_summary=summary, known_data=data) for run in open_runs([folder.folder])]
    write_text(folder.report, Report.of(runs).to_page())
    return folder.report


def merged(sentences: Iterable[tuple[str, str]], num_runs: int) -> list[str]:
    """Sentences on runs, each once with the names of the runs; of a single run no name is needed."""
    names: dict[str, list[str]] = {}
    for name, sentence in sentences:
        names.setdefault(sentence, []).append(name)
    if num_runs == 1:
        return [f"{text[0].upper()}{text[1:]}" for text in names]
    return [f"{'All runs' if len(runs) == num_runs else ', '.join(runs)}: {text}" for text, runs in names.items()]


def _verdict(run: ReportedRun) -> dict[str, Any]:
    """What a run scores beside its baselines, with a sentence."""
    value: dict[str, Any] = {"name": run.name, "split": run.split, "sentence": run_sentence(run)}
    if run.scores is None:
        return value
    head, exact = run.scores.overall, {"exact_match": run.metrics["overall"]["exact_match"]}
    more = {"num_images": run.scores.num_images, "baselines": run.metrics["baselines"]}
    return {**value, **exact, **asdict(head), "measure": head.name, **more}


MAJORITY = "the majority baseline, the most frequent training answer to each question"


def run_sentence(run: ReportedRun) -> str:
    """How a run is scored, or why it is not."""
    if run.scores is None:
        training = f"; its training: {run.training.text()}" if run.training else ""
        return f"{run.name} is not evaluated on {run.split}{training}."
    head, majority = run.scores.overall, run.metrics["baselines"].get("majority")
    questions = f"{count(head.num_questions, 'question')} about {count(run.scores.num_images, 'image')}"
    scored = f"{run.name} answers {head.score:.1%} of {questions} exactly right"
    if head.metric != EXACT:
        scored = f"{run.name} scores {head.score:.1%} by {head.name} on {questions}"
    if head.interval is None or majority is None or majority["interval"] is None:
        return f"{scored}; {FEW_IMAGES}. {MAJORITY.capitalize()}, has {head.majority:.1%}."
    compared = _beside_majority(100 * majority["difference"], Interval(*majority["interval"]))
    interval = f"(95% interval {head.interval.in_percent()})"
    return f"{scored} {interval}. That is {compared} {MAJORITY} ({head.majority:.1%})."


def _beside_majority(points: float, interval: Interval) -> str:
    if interval.low > 0:
        return f"{points:.1f} points more than"
    return f"{-points:.1f} points less than" if interval.high < 0 else "not distinguishable from"


def _image_sentence(run: ReportedRun) -> str:
    """Whether the model looks at the image, by what it scores without the right one."""
    if (shuffled := run.metrics["baselines"].get("shuffled")) is None:
        return "whether the model looks at the image is not known; to measure it: lookonce eval RUN --baselines"
    result = (
        "it looks at the image"
        if shuffled["interval"] and shuffled["interval"][0] > 0
        else "nothing shows that it looks at the image"
    )
    return f"the model scores {shuffled['score']:.1%} with {NAMES['shuffled']}, so {result}"


def comparison(runs: Sequence[ReportedRun], with_first_only: bool) -> dict[str, Any] | None:
    """All pairs, or those with the first run; raises UsageError if the runs answered different questions."""
    answered = [run.answers for run in runs if run.answers]
    if len(answered) < 2:
        return None
    return to_json(compare(answered, with_first_only=with_first_only))


def _groups(run: ReportedRun) -> dict[str, Any]:
    """The scores of a run by group, beside the baselines."""
    assert run.scores
    numbers: dict[str, Any] = {"num_groups": run.scores.num_groups}
    for by in GROUPINGS:
        conditions = run.conditions if run.scores.overall.metric == EXACT else {}  # their files have no other scores
        beside = {key: metrics.get(f"by_{by}", {}) for key, metrics in conditions.items()}
        numbers[f"by_{by}"] = {
            name: asdict(score)
            | {
                "gain": score.score - score.majority,
                "baselines": {key: scores[name]["exact_match"] for key, scores in beside.items() if name in scores},
            }
            for name, score in run.scores.groups[by].items()
        }
    return numbers


DISTANCES = ("point_distance", "point_distance_median")
"""Figures that are not shares but in the units of the answers."""
COUNTS = {
    "distinct_wrong": "different wrong answers",
    "empty": "empty answers",
    "cut": "answers cut at the token limit",
    "outside_training": "answers that training never had",
}


def _metrics(run: ReportedRun) -> dict[str, Any]:
    """All other metrics of a run, beside the baselines that the model has answered."""
    beside = {key: metrics.get("metrics", {}) for key, metrics in run.conditions.items()}
    return {name: run.metrics.get(name) for name in ("metrics", "counts", "text_metrics")} | {"baselines": beside}


def curves(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    return {
        name: {
            "loss": run_curves.loss,
            "validation_loss": run_curves.validation_loss,
            "learning_rate": run_curves.learning_rate,
            "best": run_curves.best,
            "exact_match_while_training": run_curves.exact_match,
            "score_while_training": run_curves.score,
            "highest": run_curves.highest,
            **{key: curve for key in OF_REWARDS if (curve := getattr(run_curves, key))},
        }
        for name, run_curves in _logged(runs).items()
    } or None


def _logged(runs: Sequence[ReportedRun]) -> dict[str, Curves]:
    """The curves of the runs that have logged a loss or rewards."""
    return {run.name: run.curves for run in runs if run.curves.loss or run.curves.validation_loss or run.curves.reward}


PANELS = {
    "reward": "mean reward",
    "reward_spread": "standard deviation of rewards within a question",
    "mixed_share": "share of mixed questions",
    "entropy": "entropy of drawn tokens",
    "answer_tokens": "answer length in tokens",
    "kl": "KL divergence to the model at the start",
    "learning_rate": "learning rate",
    "exact_match": "exact match while training",
    "score": "score by eval.metric while training",
}
"""The curves beside losses, and the titles of their plots."""
SHARES = ("mixed_share", "exact_match", "score")


def _panels(logged: Mapping[str, Curves]) -> Iterator[Panel]:
    is_alone, numbered = len(logged) == 1, [*enumerate(logged.items())]
    with_loss = [run_curves for run_curves in logged.values() if run_curves.loss or run_curves.validation_loss]
    if with_loss:
        lows, highs = zip(*(run_curves.loss_range() for run_curves in with_loss), strict=True)
        losses = [
            line for number, (name, run_curves) in numbered for line in _losses(name, run_curves, number, is_alone)
        ]
        yield Panel("loss", losses, (min(lows), max(highs)), height=300)
    for key, title in PANELS.items():
        lines = [
            line
            for number, (name, run_curves) in numbered
            if len(curve := getattr(run_curves, key)) > 1
            for line in _lines_of(key, "" if is_alone else name, curve, number, is_alone)
        ]
        if lines:
            yield Panel(title, lines, (0, 1) if key in SHARES else None, height=220)


def _lines_of(key: str, name: str, curve: Curve, number: int, is_alone: bool) -> list[Line]:
    if key not in OF_REWARDS:
        return [Line(name, curve, "marked" if key in SHARES else "line", number)]
    faint = [Line("", curve, "faint", number)] if is_alone else []
    return [*faint, Line(name, smoothed(curve), "line", number)]


def _losses(name: str, logged: Curves, number: int, is_alone: bool) -> list[Line]:
    faint = Line("each logged loss" if is_alone else "", logged.loss if is_alone else {}, "faint", number)
    mean = Line("mean training loss" if is_alone else name, smoothed(logged.loss), "line", number)
    name = "validation loss" if is_alone else "" if logged.loss else name
    validation = Line(name, logged.validation_loss, "marked", number + is_alone)
    return [line for line in (faint, mean, validation) if line.points]


def cost(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    costs = {run.name: asdict(Cost.of(run)) for run in runs}
    return costs if cost_lines(costs) else None


def cost_lines(costs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A line for each figure that is known of a run, with a cell for each run."""
    cells = [_cost_cells(run_cost) for run_cost in costs.values()]
    lines = [[name, *(of_run[name] for of_run in cells)] for name in (cells[0] if cells else ())]
    return [line for line in lines if any(line[1:])]


def _cost_cells(run_cost: Mapping[str, Any]) -> dict[str, str]:
    """Each figure of a run as text, by its name; empty if it is not known."""
    startup = run_cost["startup_seconds"].values()
    since = f" since step {run_cost['first_step']:,}" if run_cost["first_step"] else ""
    shown: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "encoding the cache": (run_cost["cache_seconds"], duration),
        "before the first step": (sum(startup) if startup else None, duration),
        "training": (run_cost["training_seconds"], lambda seconds: f"{duration(seconds)}{since}"),
        "answering": (
            run_cost["answering_seconds"],
            lambda seconds: f"{duration(seconds)}, {1e3 * seconds / run_cost['num_answered']:.1f} ms a question",
        ),
        "GPU hours": (run_cost["gpu_hours"], lambda hours: f"{hours:.2f} on {run_cost['num_gpus']} GPU"),
        "memory reserved": (run_cost["memory_gb"], "{:.1f} GB".format),
        "steps": (run_cost["num_steps"], "{:,}".format),
        "samples": (run_cost["num_samples"], "{:,}".format),
        "ms a sample": (run_cost["ms_per_sample"], "{:.2f}".format),
        "tokens per second": (run_cost["tokens_per_second"], "{:,.0f}".format),
        "time of the steps": (run_cost["rewards"], lambda rewards: Rewards(**rewards).time_text()),
        "waiting for data": (run_cost["wait_share"], "{:.1%}".format),
        "cache": (run_cost["cache_bytes"], size),
        "adapter": (run_cost["adapter_bytes"], size),
    }
    cells = {name: "" if value is None else show(value) for name, (value, show) in shown.items()}
    return cells | ({"GPU hours": "none, on a CPU"} if run_cost["num_gpus"] == 0 else {})


def settings(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    """All keys of all runs, and those that differ between them, or of a single run from the defaults."""
    by_run = {run.name: flatten(run.settings.model_dump(mode="json")) for run in runs if run.settings}
    if not by_run:
        return None
    defaults = None
    if len(by_run) == 1:  # those of a run file that names model, records and output, and nothing else
        [run] = [run.settings for run in runs if run.settings]
        required = {"model": {"path": run.model.path}, "data": {"train": run.data.train}, "output": run.output}
        defaults = flatten(RunFile.model_validate(required, context=RECORDED).model_dump(mode="json"))
    compared = [*by_run.values(), *([defaults] if defaults else [])]
    names = dict.fromkeys(name for values in by_run.values() for name in values)
    differing = [name for name in names if len({page.setting(values.get(name)) for values in compared}) > 1]
    return {"differing": differing, "settings": by_run, "defaults": defaults}


def _data(run: ReportedRun) -> dict[str, Any]:
    predictions = run.answers.predictions if run.answers else []
    return {
        "splits": {split: vars(facts) for split, facts in run.data.splits.items()},
        "problem": run.data.problem,
        "seen_in_training": overlap(predictions, run.data) if predictions and run.data.seen else None,
        "num_too_long": run.trained.get("num_too_long"),
        "prepared": dict(run.data.prepared),
    }


def _splits(runs: Sequence[ReportedRun]) -> list[tuple[str, ...]]:
    """The lines of a table of the splits; runs with the same splits are named together."""
    names: dict[Any, list[str]] = {}
    for run in runs:
        for split, facts in run.data.splits.items():
            names.setdefault((split, facts), []).append(run.name)
    return [
        (split, f"{facts.num_records:,}", f"{facts.num_questions:,}", f"{facts.num_images:,}", ", ".join(run_names))
        for (split, facts), run_names in names.items()
    ]


def _record_sentences(runs: Sequence[ReportedRun], numbers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is known of each run's records: the run's name, and a sentence."""
    for run in (run for run in runs if run.settings):
        assert run.settings
        if run.data.problem:
            yield run.name, f"the records cannot be read now: {run.data.problem}"
        if seen := numbers[run.name]["seen_in_training"]:
            yield run.name, _leak(run, seen)
        if too_long := numbers[run.name]["num_too_long"]:
            yield run.name, f"{count(too_long, 'training record')} left out as too long"
        if left_out := run.data.prepared.get("rows", {}).get("left_out", {}):
            reasons = ", ".join(f"{reason}: {number:,}" for reason, number in left_out.items())
            yield run.name, f"rows that lookonce data prepare left out: {reasons}"
        if not run.data.problem:
            files = [*run.settings.data.train, *run.settings.data.val, *run.settings.data.test]
            audit = shell("lookonce", "data", "audit", *files, "--html", "audit.html")
            yield run.name, f"what is in the records, and what is wrong with them: {audit}"


def _leak(run: ReportedRun, seen: dict[str, Any]) -> str:
    how = "compared by content" if seen["by_content"] else "compared by file name, which does not find renamed copies"
    if not seen["num_questions"]:
        return f"no image of {run.split} is also in training ({how})"
    score_of_others = seen["exact_match_of_others"]
    rest = "" if score_of_others is None else f"; on the others exact match is {score_of_others:.1%}"
    questions = f"{count(seen['num_questions'], 'question')} of {run.split}"
    return f"{questions} are about {count(seen['num_images'], 'image')} also in training ({how}){rest}"


UNKNOWN = "not recorded"
ELSEWHERE = "by another program, saved with lookonce.save_run"
DIGITS = 16
"""Digits of a hash that are shown; run.json has all."""


def provenance(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Versions, hashes, dates, commands and licences of each run; and what the figures do not show."""
    limits = merged(((run.name, line) for run in runs for line in _limits(run)), len(runs))
    return {"facts": {run.name: _facts(run) for run in runs}, "limits": limits}


def _facts(run: ReportedRun) -> dict[str, str]:
    if run.settings is None or run.folder is None:
        return {"run folder": "none, a predictions file"}
    train = [] if run.was_trained_elsewhere else [shell("lookonce", "train", run.folder.folder / "run.yaml")]
    return {
        "run folder": str(run.folder.folder.absolute()),
        "trained": ELSEWHERE if run.was_trained_elsewhere else _dates(run),
        "device": ", ".join(run.environment.get("gpus") or ["CPU"]) if run.environment else UNKNOWN,
        **{name: version or UNKNOWN for name, version in run.environment.get("libraries", {}).items()},
        "seed": str(run.settings.train.seed),
        "features (fingerprint)": str(run.inputs.get("cache", UNKNOWN))[:DIGITS],
        "language model (hash)": str(run.inputs.get("language_model", UNKNOWN))[:DIGITS],
        **{f"{split} records (hash)": str(digest)[:DIGITS] for split, digest in run.inputs.get("records", {}).items()},
        "commands": "; ".join([*train, shell("lookonce", "eval", run.folder.folder)]),
        "data": str(run.data.prepared.get("title", UNKNOWN)),
        "licence of the data": str(run.data.prepared.get("licence", UNKNOWN)),
        "model": str(run.settings.model.path),
    }


def _dates(run: ReportedRun) -> str:
    """When the first and the last line of the log were written."""
    times = [line["time"] for line in run.log if isinstance(line.get("time"), int | float)]
    if not times:
        return UNKNOWN
    first, last = (datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M") for moment in (times[0], times[-1]))
    return f"{first} to {last} UTC"


def _limits(run: ReportedRun) -> Iterator[str]:
    """What the figures of a run do not show."""
    if run.was_trained_elsewhere:
        yield (
            "another program trained the adapter: its steps, its time and its settings are not recorded, and "
            "the sections batch and train are not those of its training"
        )
    if run.answers is None or run.scores is None:
        return
    if run.scores.num_images < MIN_CLUSTERS:
        yield FEW_IMAGES
    if missing := [NAMES[key] for key in BASELINES if key not in run.metrics["baselines"]]:
        yield f"not measured: {', '.join(missing)}"
    if run.split == "val":
        yield "val is not a final test: epochs or settings may have been chosen by it"
    if not all(prediction.image_keys or not prediction.images for prediction in run.answers.predictions):
        yield "predictions of an earlier version, without image keys: images are compared by their paths"
    if run.settings:
        yield (
            "the intervals cover the choice of test images, not the randomness of training; train each variant with "
            "several seeds"
        )
