"""`lookonce selftest`: test that packs are exact on this machine. The work is done in `selftest`."""

from __future__ import annotations

import click

from lookonce.commands.options import JSON, emit, notify


@click.command()
@JSON
@click.pass_context
def selftest(context: click.Context, as_json: bool) -> None:
    """Test that packs are exact on this machine.

    Compares packs with the rows of stock training, on this GPU with these libraries: masks, attention forward and
    backward, and loss and gradients of a small model, in float32 and in bfloat16, compiled or not, launched or replayed
    as CUDA graphs, with FlexAttention and with dense masks. Each difference may be a few times the spread, which is
    measured in the same run between exact ways to compute rows. Takes a minute or two on a GPU. Without one, small
    packs are compared with dense masks.

    Exits with 1 if anything differs by more, and prints the fastest settings that are exact. The first training on a
    GPU with new libraries runs this test by itself; LOOKONCE_SELFTEST=off in the environment skips that.

    \b
    Keys of --json: ok, combination (the GPU, driver and versions), checks (what, difference, allowed, ok, error),
    exact (lists of settings, the fastest first), fastest (options of `lookonce train`), seconds.

    \b
    Examples:
      lookonce selftest
      lookonce selftest --json
    """
    from lookonce.selftest.report import save_note
    from lookonce.selftest.run import run_selftest

    report = run_selftest(notify=notify)
    if report.combination["device"] != "CPU":
        save_note(report, notify)
    emit(report.to_json(), report.text(), as_json)
    context.exit(0 if report.ok else 1)
