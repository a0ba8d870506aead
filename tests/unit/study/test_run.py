"""The jobs of a study, and the GPUs they run on."""

from __future__ import annotations

import pytest
import torch

from lookonce.study.expand import expand
from lookonce.study.file import read_study
from lookonce.study.run import find_jobs, visible_gpus


@pytest.mark.parametrize(
    ("variable", "number", "found"),
    [(None, 0, []), (None, 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), ("", 0, []), ("GPU-a1", 1, ["GPU-a1"])],
)
def test_gpus_have_the_names_of_the_variable_if_it_is_set(monkeypatch, variable, number, found):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == found


def test_runs_with_the_same_images_share_a_build_and_wait_for_theirs_only(write_study):
    arms = {"a": None, "b": {"starts_from": "a"}, "small": {"cache.max_pixels": 65536}}
    jobs = {job.name: job for job in find_jobs(expand(read_study(write_study(arms, seeds=[1, 2]))), set())}
    assert {name for name in jobs if name.startswith("cache")} == {"cache of a", "cache of small"}
    assert jobs["a-2"].after == ("cache of a",) and jobs["small-1"].after == ("cache of small",)
    assert jobs["b-2"].after == ("cache of a", "a-2") and jobs["a-1"].cost == 32
    assert jobs["cache of a"].command[:2] == ("cache", "build") and not jobs["cache of a"].is_done()
