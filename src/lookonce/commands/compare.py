"""`lookonce compare`: whether one run is better than another; `lookonce report`: a page about runs."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import JSON, PATH, PDF, SPLIT, emit, notify
from lookonce.errors import UsageError
from lookonce.run.sections import check_metric_name
from lookonce.text import count

RUNS = click.argument("paths", metavar="RUN...", type=PATH, nargs=-1, required=True)
BASELINE = click.option(
    "--baseline", type=PATH, metavar="RUN", help="Compare every other run with this one only, instead of all pairs."
)


def _metric(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    try:
        return name and check_metric_name(name)
    except ValueError as error:
        raise UsageError(f"--metric {name}: {error}") from None


METRIC = click.option(
    "--metric",
    metavar="NAME",
    callback=_metric,
    help="What counts: a value of `eval.metric`, such as token_f1 or bleu; by default that of the runs.",
)


def _with_baseline(paths: tuple[Path, ...], baseline: Path | None) -> tuple[Path, ...]:
    return (baseline, *(path for path in paths if path.absolute() != baseline.absolute())) if baseline else paths


@click.command()
@RUNS
@SPLIT
@BASELINE
@METRIC
@JSON
def compare(
    paths: tuple[Path, ...], split: str | None, baseline: Path | None, metric: str | None, as_json: bool
) -> None:
    """Show whether one run is better than another on the same questions.

    RUN is a run folder, a run file, or a file of predictions. The questions must be the same; they are joined by image,
    question and turn.

    The difference of each pair has a 95 % interval over images, and the p of 10,000 sign flips by image, corrected for
    the number of pairs (Holm). With fewer pairs, smaller differences are distinguishable: with --baseline, chosen
    before looking, each other run makes one pair.

    Runs whose run files differ in `train.seed` alone count as one, with the mean of their scores and the spread between
    them. One is called better only if the interval of the difference excludes 0, p is below 0.05, and the difference
    exceeds the spread.

    What counts is the metric of the runs (`eval.metric`), or --metric. Sentences hardly ever match exactly; token_f1
    compares the words that answers have in common with their references (SQuAD's F1). Choose before looking.

    \b
    Keys of --json:
      num_questions, num_images
      metric, is_exact_match_poor (whether it says little about these answers)
      candidates   name, runs, seeds, exact_match, score (by the metric), interval, majority, spread
      pairs        first, second, difference (second less first), interval, p, p_holm, only_first, only_second,
                   spread, are_seeds, metric, better (a name or null), sentence
      prompts      which earlier answers stand in the prompts of each run, if runs differ: predicted, reference, none

    \b
    Examples:
      lookonce compare runs/first runs/second
      lookonce compare runs/exp1-* runs/exp2-* --split test --baseline runs/exp1-42
      lookonce compare runs/x1-first runs/x1-second --metric meteor
      lookonce compare runs/first/predictions/val.jsonl runs/second/predictions/val.jsonl --json
    """
    from lookonce.eval.compare import compare as run_comparison
    from lookonce.eval.compare import to_json, to_text
    from lookonce.eval.join import read_runs

    paths = _with_baseline(paths, baseline)
    if len(paths) < 2:
        raise UsageError("comparing needs two runs; name them: lookonce compare RUN RUN")
    comparison = run_comparison(read_runs(paths, split), with_first_only=baseline is not None, metric=metric)
    emit(to_json(comparison), to_text(comparison), as_json)


@click.command()
@RUNS
@SPLIT
@BASELINE
@METRIC
@click.option(
    "-o", "--output", type=PATH, metavar="FILE", default=Path("report.html"), show_default=True, help="Page to write."
)
@PDF
@JSON
def report(
    paths: tuple[Path, ...],
    split: str | None,
    baseline: Path | None,
    metric: str | None,
    output: Path,
    has_pdf: bool,
    as_json: bool,
) -> None:
    """Write one HTML page about a run, or about several side by side.

    RUN is a run folder, a run file, or a file of predictions. The page needs no network and no script, so it can be
    sent by mail. It has the scores beside the baselines, with 95 % intervals, by question, category, source and stage;
    curves; 48 right and wrong answers with their images; the most frequent wrong answers; cost, settings, data and
    versions. For several runs, it also has the comparison of `lookonce compare`, and answers that only one of two runs
    has right.

    `lookonce train` writes the page of its run to report.html in the run folder. The training need not have ended, and
    image files may be missing: the page says what is absent.

    \b
    Keys of --json, each null if nothing is known:
      verdict      runs: metric, measure (its name), num_questions, num_images, score, interval, majority, exact_match,
                   baselines, sentence
      comparison   the keys of lookonce compare --json
      contexts     of runs with data.context: name, num_seeds, num_questions, exact_match (predicted, reference, none),
                   differences, not_asked
      groups       by run: by_question, by_category, by_source, by_stage
      metrics      by run: the keys of metrics/SPLIT.json
      curves, answers, errors, cost, settings, data, provenance     as on the page

    \b
    Examples:
      lookonce report runs/first
      lookonce report runs/first runs/second --split test -o comparison.html
      lookonce report runs/first --pdf
      lookonce report runs/first --json
    """
    from lookonce.files import write_text
    from lookonce.report.report import Report, check_replaces_page, write_plots
    from lookonce.report.runs import open_runs
    from lookonce.run.folder import claimed_around

    paths = _with_baseline(paths, baseline)
    check_replaces_page(output)
    with claimed_around(output, "lookonce report"):
        run_report = Report.of(open_runs(paths, split), with_first_only=baseline is not None, metric=metric)
        write_text(output, run_report.to_page())
        drawn = write_plots(run_report.plots(), output) if has_pdf else []
    notify(f"wrote the page to {output}" + (f", and {count(len(drawn), 'plot')} as PDF beside it" if has_pdf else ""))
    emit(run_report.to_json(), "\n".join(run_report.sentences()), as_json)
