"""Models of families that are not known are refused by every command that opens the model, before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.answers import look_trained

from lookonce.cli import main
from lookonce.run.folder import RunFolder

REFUSED = "is of type 'paligemma', which lookonce does not support; supported: qwen3_vl (Qwen3-VL), qwen3_vl_moe"


@pytest.fixture(scope="module")
def paligemma(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that says that its model is a PaliGemma."""
    folder = tmp_path_factory.mktemp("models") / "paligemma"
    shutil.copytree(sample / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "paligemma"}))
    return folder


@pytest.mark.parametrize("words", ["cache plan", "cache build", "train", "status", "check", "eval", "predict"])
def test_it_is_refused_by_name_before_any_work(words, paligemma, make_run, tmp_path):
    run = make_run(model={"path": str(paligemma)})
    arguments = [str(tmp_path / "run.yaml")]
    Path(arguments[0]).write_text(run.to_yaml())
    if words in ("eval", "predict"):
        RunFolder(run.output).claim(run, {})
        RunFolder(run.output).adapter.mkdir()
        look_trained(RunFolder(run.output))
        arguments = [str(run.output), *(["--question", "Is there text?"] if words == "predict" else [])]
    result = CliRunner().invoke(main, [*words.split(), *arguments])
    said = " ".join((result.stdout + result.stderr).split())
    assert result.exit_code == 1 and REFUSED in said, said
    assert "unexpected" not in said and not list(tmp_path.glob("caches/*/"))
