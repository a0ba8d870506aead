"""`lookonce report`: one page with all that is known of runs. The work is done in `report`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import JSON, PATH, SPLIT, emit, notify


@click.command()
@click.argument("paths", metavar="RUN...", type=PATH, nargs=-1, required=True)
@SPLIT
@click.option("--baseline", type=PATH, metavar="RUN", help="Compare the others with this run only, not all with all.")
@click.option(
    "-o", "--output", type=PATH, metavar="FILE", default=Path("report.html"), show_default=True, help="Page to write."
)
@JSON
def report(
    paths: tuple[Path, ...],
    split: str | None,
    baseline: Path | None,
    output: Path,
    as_json: bool,
) -> None:
    """Write one HTML page with all that is known of a run, or of several side by side.

    RUN is a run folder, a run file, or a file of predictions. The page needs no network and no script, so it can be
    sent by mail. It has the scores beside the baselines, with 95 % intervals, by question, category, source and stage;
    curves; 48 right and wrong answers with their images; the most frequent wrong answers; cost, settings, data and
    versions. Of several runs it also has the comparison of `lookonce compare`, and answers that only one of two runs
    has right.

    `lookonce train` writes the page of its run to report.html in the run folder. Neither a training that has ended nor
    image files are needed: the page says what is absent.

    \b
    Keys of --json, each null if nothing is known:
      verdict      runs: num_questions, num_images, exact_match, interval, majority, baselines, sentence
      comparison   the keys of lookonce compare --json; where exact match says little, token_f1 has them again
      contexts     of runs with data.context: name, num_seeds, num_questions, exact_match (own, true, none),
                   differences, not_asked
      groups       by run: by_question, by_category, by_source, by_stage
      metrics      by run: the keys of metrics/SPLIT.json
      curves, answers, errors, cost, settings, data, provenance     as on the page

    \b
    Examples:
      lookonce report runs/first
      lookonce report runs/first runs/second --split test -o comparison.html
      lookonce report runs/first --json
    """
    from lookonce.files import write_text
    from lookonce.report.report import Report, check_replaces_page
    from lookonce.report.runs import open_runs
    from lookonce.run.folder import claimed_around

    if baseline:
        paths = (baseline, *(path for path in paths if path.absolute() != baseline.absolute()))
    check_replaces_page(output)
    with claimed_around(output, "lookonce report"):
        found = Report.of(open_runs(paths, split), with_first_only=baseline is not None)
        write_text(output, found.to_page())
    notify(f"wrote the page to {output}")
    emit(found.to_json(), "\n".join(found.sentences()), as_json)
