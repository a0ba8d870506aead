"""Files and folders have the modes that the umask asks for, whichever library writes them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from lookonce.cli import main


@pytest.fixture(params=[0o027, 0o002], ids=["027", "002"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """027 keeps others out, 002 lets a group write."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def invoke(*words: str) -> None:
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output


def wrong_modes(folder: Path, umask: int) -> dict[str, str]:
    """The files and folders whose mode is not what the umask leaves of 666 or 777."""
    found = {}
    for path in folder.rglob("*"):
        is_code = path.suffix == ".compiled"  # which is not read where others may write
        expected = (0o777 if path.is_dir() else 0o644 if is_code else 0o666) & ~umask
        if not path.is_symlink() and (mode := stat.S_IMODE(path.stat().st_mode)) != expected:
            found[str(path.relative_to(folder))] = oct(mode)
    return found


@pytest.mark.guarantee("Files follow the umask.")
def test_all_files_follow_the_umask(umask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "work"
    folder.mkdir()
    invoke("sample", "work/sample")
    text = (Path(__file__).parents[3] / "experiments" / "sample.yaml").read_text().replace("data/sample", "work/sample")
    text = text.replace("dir: caches", "dir: work/caches").replace("runs/sample", "work/run")
    (folder / "run.yaml").write_text(text.replace("epochs: 24", "steps: 4\n  save_steps: 2"))
    invoke("cache", "build", "work/run.yaml")
    invoke("train", "work/run.yaml")
    invoke("eval", "work/run", "--split", "test")
    invoke("report", "work/run")
    invoke("predict", "work/run", "--records", "work/sample/test.jsonl", "-o", "work/answers.jsonl")
    invoke("data", "convert", "work/sample/test.jsonl", "work/out/test.parquet")
    invoke("data", "audit", "work/sample/test.jsonl", "--html", "work/audit.html")
    invoke("cache", "verify", "work/run.yaml")
    written = {path.name for path in folder.rglob("*")}
    assert {"adapter_model.safetensors", "optimizer.pt", "report.html", "manifest.json", "test.jsonl"} <= written
    assert wrong_modes(folder, umask) == {}
