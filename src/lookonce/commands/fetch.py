"""`lookonce fetch`: download what jobs without internet need. The work is done in `lookonce.fetch`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from lookonce.commands.options import JSON, RUN, SET, emit, notify, read_run


@click.command()
@RUN
@SET
@click.option("--pin", "pins", is_flag=True, help="Write the commits of what was downloaded into RUN.yaml.")
@JSON
def fetch(run_file: Path, assignments: tuple[str, ...], pins: bool, as_json: bool) -> None:
    """Download everything that a run needs, while there is internet.

    Downloads the model at `model.revision` (safetensors weights, configurations, tokenizer), compares its files with
    the hashes that the Hub states, opens it as jobs will, checks that records and images exist, and prints the
    environment variables for jobs. A model folder is only checked. An adapter on the Hub that `train.start_from` names
    is downloaded too. Both are stored in HF_HOME, which all nodes must share.

    Exits with 1 if something is missing that it cannot download.

    \b
    Examples:
      lookonce fetch data/sample/run.yaml
      lookonce fetch run.yaml --pin
      lookonce fetch run.yaml --set model.revision=main --json
    """
    run = read_run(run_file, assignments)
    from lookonce.fetch import fetch as fetch_run
    from lookonce.fetch import pin

    report = fetch_run(run)
    emit(asdict(report), report.text(), as_json)
    if pins and report.commit:
        is_new = pin(run_file, report.commit)
        notify(f"{run_file} {'now has' if is_new else 'already has'} model.revision: {report.commit}")
    elif not report.is_pinned:
        notify(
            f"model.revision is {run.model.revision or 'not set'}, so the model may change; pin this one with --pin, "
            f'or in section `model`: revision: "{report.commit}"'
        )
    if report.start:
        _pin_start(run_file, report.start, report.is_start_pinned, pins)
    sys.exit(1 if report.problems else 0)


def _pin_start(run_file: Path, start: str, is_pinned: bool, pins: bool) -> None:
    """Write the commit of the adapter to start from, or say how."""
    from lookonce.fetch import pin_start
    from lookonce.run.sections import hub_adapter

    adapter = hub_adapter(start)
    assert adapter is not None and adapter.revision is not None
    if pins:
        is_new = pin_start(run_file, adapter.name, adapter.revision)
        notify(f"{run_file} {'now has' if is_new else 'already has'} train.start_from: {start}")
    elif not is_pinned:
        notify(f'train.start_from names no commit; pin this one with --pin, or write: start_from: "{start}"')
