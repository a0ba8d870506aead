"""Paths of run files: `~` and environment variables are expanded, and a variable must be set."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookonce.errors import UsageError
from lookonce.run.config import RunFile, read_run_file

MINIMAL = "model: {path: m}\ndata: {train: a.jsonl}\noutput: runs/a\n"


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.delenv("UNSET", raising=False)

    def read(*assignments: str) -> RunFile:
        (tmp_path / "run.yaml").write_text(MINIMAL)
        return read_run_file(tmp_path / "run.yaml", assignments)

    return read


def test_a_tilde_is_the_home_folder(read):
    run = read("output=~/runs", "data.train=~/a.jsonl", "model.path=~/m")
    assert run.output == Path("/home/someone/runs") and run.data.train == [Path("/home/someone/a.jsonl")]
    assert run.model.path == "/home/someone/m"


@pytest.mark.parametrize("path", ["$MODELS/x", "${MODELS}/x"])
def test_environment_variables_are_expanded(read, path):
    run = read(f"model.path={path}", f"cache.dir={path}", f"data.val={path}")
    assert run.model.path == "/models/x"
    assert run.cache.dir == Path("/models/x") and run.data.val == [Path("/models/x")]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-8B-Instruct", "./owner/name"])
def test_the_name_of_a_model_stays_as_it_is(read, name):
    """Without its ./ a folder would have the form of a Hub name."""
    assert read(f"model.path={name}").model.path == name


@pytest.mark.parametrize("key", ["model.path", "data.image_root", "cache.dir", "output", "data.train"])
@pytest.mark.parametrize("path", ["$UNSET/x", "${UNSET}/x"])
def test_a_variable_that_is_not_set_is_refused(read, key, path):
    message = rf"  {key}.*: the environment variable UNSET is not set; set it, or write the path .*\(got .*UNSET.*/x'\)"
    with pytest.raises(UsageError, match=message):
        read(f"{key}={path}")


@pytest.mark.parametrize("key", ["model.path", "output"])
def test_an_empty_variable_is_refused(read, monkeypatch, key):
    """With an empty SCRATCH, $SCRATCH/caches would be /caches."""
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(UsageError, match=f"  {key}: the environment variable EMPTY is empty; set it, or write"):
        read(f"{key}=$EMPTY/x")
    assert read("cache.stage=${EMPTY}/x").cache.stage == Path("${EMPTY}/x")


def test_the_home_of_an_unknown_user_is_refused(read):
    with pytest.raises(UsageError, match="output: there is no home folder of ~no-such-user"):
        read("output=~no-such-user/runs")


def test_in_cache_stage_a_variable_need_not_be_set(read):
    """SLURM_TMPDIR is set within jobs only, and the run file is also read elsewhere. The folder is never made."""
    assert read("cache.stage=$UNSET/caches").cache.stage == Path("$UNSET/caches")
    assert read("cache.stage=$MODELS/caches").cache.stage == Path("/models/caches")
