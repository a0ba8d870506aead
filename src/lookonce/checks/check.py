"""Check a run file: everything that would stop the run later, or surprise, all at once and in seconds.

Design: each check finds out as much as it can and leaves out what depends on something that is broken, so one mistake
does not hide the next. Nothing is downloaded, no GPU is needed and no weights are read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lookonce.checks.report import CheckReport
from lookonce.checks.run_file import check_run_file

FIRST_RECORDS = 1000
"""How many records of each file are read, unless all are asked for."""


def check(
    path: Path, assignments: Sequence[str] = (), most: int | None = FIRST_RECORDS, gpu_memory_gb: float | None = None
) -> CheckReport:
    """Check the run file at `path`; reads at most `most` records of each file, or all of them for None.

    `gpu_memory_gb` is the memory of the GPU that will train; by default that of this machine.
    """
    began = time.perf_counter()
    run, results = check_run_file(path, assignments)
    if run is None:
        return CheckReport(path, 0, False, time.perf_counter() - began, results)
    from lookonce.checks.disk import check_disk
    from lookonce.checks.images import check_images
    from lookonce.checks.memory import check_memory
    from lookonce.checks.model import check_model
    from lookonce.checks.output import check_output
    from lookonce.checks.records import check_context, check_records, count_records
    from lookonce.checks.settings import check_settings
    from lookonce.checks.start import check_start
    from lookonce.checks.tokens import check_tokens
    from lookonce.environment import gpu_gb

    records, of_records = check_records(run, most)
    model, of_model = check_model(run)
    images, of_images = check_images(run, records, model)
    results += [*check_settings(run), *count_records(records, images.keys), *of_records, *of_model, *of_images]
    results += check_context(run, records, images.keys)
    results += check_tokens(run, records, model, images)
    results += check_disk(run, model, images, records.is_complete)
    results += check_memory(run, model, gpu_memory_gb or gpu_gb())
    results += [*check_start(run), *check_output(run, images)]
    return CheckReport(path, records.num_records, records.is_complete, time.perf_counter() - began, results)
