"""The self-test before a training runs in a process of its own, which sends its report back."""

from __future__ import annotations

from functools import partial

from lookonce.selftest.report import Check, Report, Way
from lookonce.workflow import in_own_process


def test_a_report_comes_back_from_a_new_process():
    report = partial(Report, {"device": "a GPU"}, (Check("model", 0.5, 0.1, Way(), "an error"),), 50)
    assert in_own_process(report) == report()
