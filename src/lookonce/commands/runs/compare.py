"""`lookonce compare`: whether one run is better than another. The work is done in `eval.comparison`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import JSON, PATH, SPLIT, emit


@click.command()
@click.argument("paths", metavar="RUN...", type=PATH, nargs=-1, required=True)
@SPLIT
@click.option("--baseline", type=PATH, metavar="RUN", help="Compare the others with this run only, not all with all.")
@JSON
def compare(paths: tuple[Path, ...], split: str | None, baseline: Path | None, as_json: bool) -> None:
    """Show whether one run is better than another on the same questions.

    RUN is a run folder, a run file, or a file of predictions. The questions must be the same; they are joined by image,
    question and turn.

    The difference of each pair has a 95 % interval from 10,000 resamples of the images, and the p of 10,000 sign flips
    by image, corrected for the number of pairs (Holm). Fewer pairs are easier to tell apart: with --baseline, chosen
    before looking, there is one for each other run. McNemar's exact p takes questions of one image as independent.

    Runs whose run files differ in `train.seed` alone count as one, with the mean of their scores and the spread between
    them. One is called better only if its interval does not hold 0, p is below 0.05, and it exceeds the spread.

    \b
    Keys of --json:
      num_questions, num_images
      candidates   name, runs, seeds, exact_match, interval, majority, spread
      pairs        first, second, difference (second less first), interval, p, p_holm, only_first, only_second,
                   p_mcnemar, spread, are_seeds, better (a name or null), sentence
      prompts      whose answers stand in the prompts of each run, if runs differ

    \b
    Examples:
      lookonce compare runs/first runs/second
      lookonce compare runs/exp1-* runs/exp2-* --split test --baseline runs/exp1-42
      lookonce compare runs/first/predictions/val.jsonl runs/second/predictions/val.jsonl --json
    """
    from lookonce.errors import UsageError
    from lookonce.eval.comparison.compare import compare as run_comparison
    from lookonce.eval.comparison.report import to_json, to_text
    from lookonce.eval.comparison.runs import read_runs

    if baseline:
        paths = (baseline, *(path for path in paths if path.absolute() != baseline.absolute()))
    if len(paths) < 2:
        raise UsageError("comparing needs two runs; name them: lookonce compare RUN RUN")
    comparison = run_comparison(read_runs(paths, split), with_first_only=baseline is not None)
    emit(to_json(comparison), to_text(comparison), as_json)
