"""`lookonce study`: plan, run, show and compare several trainings. The work is done in `study`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from lookonce.commands.options import (
    JSON,
    PATH,
    PDF,
    Decimal,
    check_alone,
    check_launch,
    emit,
    notify,
    only_results_on_stdout,
)
from lookonce.text import count, shell

STUDY = click.argument("study_file", metavar="STUDY.yaml", type=PATH)


@click.group()
def study() -> None:
    """Train several variants with several seeds, and compare them.

    A study file names a base run file, variants that change it, and seeds. Each variant with each seed is an ordinary
    run, with a run file and a run folder of its own.

    \b
    Examples:
      lookonce study plan study.yaml
      lookonce study run study.yaml
      lookonce study status study.yaml
      lookonce study report study.yaml
    """


@study.command()
@STUDY
@click.option(
    "--rate",
    type=Decimal(0, 86_400_000, min_open=True),
    metavar="MS",
    help="Training time of the first variant, in milliseconds per sample.",
)
@JSON
def plan(study_file: Path, rate: float | None, as_json: bool) -> None:
    """Show what a study will cost, and what would stop it.

    Counts the steps of each variant, the answers and the tokens that it trains on. Times follow from the rate of
    variants that have been trained, or from --rate. Writes nothing and needs no GPU. Exits 1 if something would stop a
    run.

    \b
    Keys of --json:
      variants   variant, starts_from, answers_of, num_runs, num_left, seconds, and workload: num_steps, num_samples,
                 num_answers, num_tokens, errors
      seconds (of all runs that are left), outdated, wrong_routes, errors

    \b
    Examples:
      lookonce study plan study.yaml
      lookonce study plan study.yaml --rate 3.1
    """
    check_launch()
    from lookonce.study.plan import plan_study

    study_plan = plan_study(study_file, rate)
    emit(study_plan.to_json(), study_plan.text(), as_json)
    sys.exit(1 if study_plan.errors else 0)


@study.command()
@STUDY
@click.option(
    "--parallel",
    "num_parallel",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Number of runs at the same time; by default one per GPU.",
)
@click.option("--again", is_flag=True, help="Train again the runs whose settings have changed in the study file.")
@JSON
def run(study_file: Path, num_parallel: int | None, again: bool, as_json: bool) -> None:
    """Train and evaluate the runs that are missing.

    Builds the cache, then starts a process on each GPU, first for the runs that the longest sequences wait for. A
    variant that starts from another one waits for the run with its seed. Runs with data.context are also evaluated with
    reference answers and with none. If a run fails, the command names it, skips the runs that start from it, and
    finishes all others; the exit code is then 1. Started again, it continues with what is missing.

    On SIGUSR1 or SIGTERM, passes the signal on, waits for the checkpoints and exits with code 75.

    If the study file has changed since some runs were trained, it names these runs and the changes, and starts nothing.
    --again trains them again, and moves their old folders away.

    \b
    Keys of --json:
      done, failed, skipped, stopped, and the keys of lookonce study status --json

    \b
    Examples:
      lookonce study run study.yaml
      lookonce study run study.yaml --parallel 2
      lookonce study run study.yaml --again
    """
    check_alone("lookonce study run, which starts a process on each GPU,")
    with only_results_on_stdout():
        from lookonce.study.run import run_study
        from lookonce.study.state import StudyStatus

        outcome = run_study(study_file, again, num_parallel, notify)
        state = StudyStatus.read(study_file)
    emit(asdict(outcome) | state.to_json(), "\n".join(filter(None, [state.text(), outcome.text()])), as_json)
    sys.exit(outcome.exit_code)


@study.command()
@STUDY
@JSON
def status(study_file: Path, as_json: bool) -> None:
    """Show how far the runs of a study are: state, steps, score.

    \b
    Keys of --json:
      runs     run, variant, seed, starts_from, answers_of, folder, training (see lookonce status --help), score,
               is_complete, not_asked (contexts other than its own), outdated
      routed   variants with `route`: run, variant, seed, by, runs, folder, score
      mixed    which runs were trained on different records or weights, although they name the same files

    \b
    Examples:
      lookonce study status study.yaml
      lookonce study status study.yaml --json
    """
    from lookonce.study.state import StudyStatus

    study_status = StudyStatus.read(study_file)
    emit(study_status.to_json(), study_status.text(), as_json)


@study.command()
@STUDY
@JSON
def jobs(study_file: Path, as_json: bool) -> None:
    """Print what is missing, as jobs for the scheduler of a cluster.

    Prints one line per job: its kind (cache, train, eval or report), its name, its run file, the jobs that must have
    succeeded before (with commas, or -), and options of the command, with tabs between the fields. A job is listed
    after those that it waits for. The report waits until all have ended. slurm/study.sh submits these jobs to Slurm.

    Refuses the same studies as lookonce study run. Writes the run files and starts nothing.

    \b
    Keys of --json, a list of objects:
      kind, name, file (the run file; of a report the study file), after, options

    \b
    Examples:
      lookonce study jobs study.yaml
      lookonce study jobs study.yaml --json
    """
    from lookonce.study.run import fields_of, find_missing, line_of

    missing_jobs = find_missing(study_file)
    if missing_jobs or as_json:
        emit([fields_of(job) for job in missing_jobs], "\n".join(map(line_of, missing_jobs)), as_json)


@study.command()
@STUDY
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Page to write; by default report.html of the study.")
@PDF
@JSON
def report(study_file: Path, output: Path | None, has_pdf: bool, as_json: bool) -> None:
    """Compare the variants of a study, and write one HTML page about its runs.

    The runs of a variant differ in their seed, and count as one. The figures are those of lookonce compare. The page is
    that of lookonce report; it begins with a forest plot of the variants, their table, and the methods as a paragraph
    for a paper. Then it shows scores by question and by stage, the forgetting of sequences of trainings, and the effect
    of earlier answers in the prompts. The tables are written beside it as CSV and LaTeX, the methods as LaTeX.
    Incomplete runs are left out, and named. The majority answers (always the most frequent training answer to a
    question) are those of the base run's training records, for every variant.

    \b
    Keys of --json: those of lookonce compare and lookonce report, and
      variants     variant, seeds, metric, score, score_by_seed, interval, majority, spread, difference,
                   difference_interval, p_holm, is_distinguishable; cost: needs (variants), num_records,
                   training_seconds, answering_seconds
      scores_by    question and stage: of each its num_questions, majority, and the exact match of each variant
      forgetting   variants, seeds, stages, exact_match (by variant and stage), forgetting (by stage)
      left_out, majority (whose answers it has, as a sentence), methods (a paragraph)

    \b
    Examples:
      lookonce study report study.yaml
      lookonce study report study.yaml -o study.html --json
      lookonce study report study.yaml --pdf
    """
    from lookonce.report.report import check_replaces_page
    from lookonce.run.folder import RunClaim, claimed_around
    from lookonce.study.file import PAGE, expand, read_study
    from lookonce.study.report import report_study
    from lookonce.study.state import PATIENCE_S, find_mixed

    if output:
        check_replaces_page(output)
    folder = read_study(study_file).output
    page = output or folder / PAGE
    with RunClaim(folder, "lookonce study report") as owner, claimed_around(page, "lookonce study report"):
        owner.take(patience_s=PATIENCE_S)
        study_report = report_study(study_file)
        written = study_report.write(page, has_pdf)
    for name in study_report.left_out:
        command = shell("lookonce", "study", "run", study_file)
        notify(f"{name} is not complete, and left out; complete it with: {command}")
    for sentence in find_mixed(expand(read_study(study_file))):
        notify(sentence)
    notify(f"wrote the page to {page}, and {count(len(written), 'file')} for a paper beside it")
    emit(study_report.to_json(), study_report.text(), as_json)
