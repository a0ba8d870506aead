"""`lookonce adapter check`: whether another program takes a run's adapter. The work is done in `adapter.vllm`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.adapter.group import adapter
from lookonce.commands.options import JSON, PATH, emit, remember_run_file


@adapter.command("check")
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.option(
    "--for",
    "program",
    type=click.Choice(["vllm"]),
    default="vllm",
    show_default=True,
    help="The program that is to serve it.",
)
@JSON
def check(run_dir: Path, program: str, as_json: bool) -> None:
    """Compare a run's adapter with the rules of a program that serves adapters, and print the command that does.

    RUN is the folder of a trained run, or its run file. Each rule is printed with the published code that it was read
    in; vLLM itself need not be installed. The exit code is 1 if a rule is not kept. A warning says that vLLM was
    reported to load such an adapter and then to ignore it.

    \b
    Keys of --json: for, passed, adapter, rules (name, passed, found, source), command, notes.

    \b
    Examples:
      lookonce adapter check runs/kvasir
      lookonce adapter check runs/kvasir/run.yaml --for vllm --json
    """
    from lookonce.adapter.vllm import check_for_vllm

    if run_dir.is_file():
        remember_run_file(run_dir)
    done = check_for_vllm(run_dir)
    emit(done.to_json(), done.text(), as_json)
    if not done.passed:
        click.get_current_context().exit(1)
