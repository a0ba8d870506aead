"""The notebook in `examples/` runs from its first cell to its last, on the sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lookonce.run.config import RunFile, read_run_file
from lookonce.workflow import train


def code_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def trained_sample(root: Path, sample: Path, copy_built, folder: Path) -> None:
    """The sample and a short training of its run, in the folders that the README's commands make."""
    shutil.copytree(sample, folder / "data" / "sample")
    copy_built(folder / "caches", folder / "data" / "sample")
    run: RunFile = read_run_file(root / "experiments" / "sample.yaml", ["train.steps=6", "eval.max_new_tokens=4"])
    train(run, notify=lambda note: None)


def test_the_cells_of_the_notebook_run_one_after_another(root, sample, copy_built, tmp_path, monkeypatch, capsys):
    """In one namespace, as Jupyter does it; Jupyter itself is not needed."""
    monkeypatch.chdir(tmp_path)
    trained_sample(root, sample, copy_built, tmp_path)
    capsys.readouterr()
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    namespace: dict[str, object] = {"__name__": "__main__"}
    cells = code_of(root / "examples" / "ask.ipynb")
    for number, code in enumerate(cells):
        exec(compile(code, f"ask.ipynb, cell {number}", "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    assert len(cells) == 6 and len(printed) == 1 + 8 * 2 + 1 + 5 + 2, printed
    assert printed[-2].startswith("trained: ") and printed[-1].startswith("untuned: ")


def test_the_notebook_is_stored_without_output(root):
    cells = json.loads((root / "examples" / "ask.ipynb").read_text())["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[]] * 6
    assert {cell["execution_count"] for cell in cells if cell["cell_type"] == "code"} == {None}
