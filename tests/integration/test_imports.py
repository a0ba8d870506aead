"""What a new Python process imports, and when: commands that need no model answer in a fraction of a second."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from lookonce.run.open import Needs, open_run


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, which is then first on the import path."""
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)


def test_our_datasets_folder_is_not_mistaken_for_hugging_faces_library(root):
    done = run_python("import lookonce, transformers.utils as u; print(u.is_datasets_available())", root)
    found = run_python("import datasets; print(datasets.__file__)", root.parent)
    is_installed = found.returncode == 0 and found.stdout.strip() != "None"
    assert done.stdout.split()[-1] == str(is_installed), done.stderr


def test_help_imports_no_large_library(root):
    """Nor huggingface_hub, which reads when it is imported whether to show its bars: `cli.main` sets that before."""
    large = {"torch", "transformers", "huggingface_hub"}
    code = f"import sys, lookonce.cli, lookonce.run.config; print({large} & set(sys.modules))"
    assert run_python(code, root).stdout.strip() == "set()"


def test_a_command_imports_only_what_it_uses_and_transformers_believes_so_no_longer(root):
    code = """
import gc, sys
from lookonce.environment import fewer_imports
with fewer_imports():
    import lookonce.workflow
from transformers import utils
from transformers.utils import import_utils
installed = utils.is_scipy_available(), import_utils.is_scipy_available()
print({"datasets", "pandas", "scipy", "sklearn"} & set(sys.modules), len(set(installed)), gc.isenabled(), installed[0])
"""
    done = run_python(code, root)
    assert done.stdout.split() == ["set()", "1", "True", str(find_spec("scipy") is not None)], done.stderr


READ_ONLY = """
import math, sys
from lookonce.datasets import images
from lookonce.cli import main
images.now = lambda: math.inf  # the sample may be too new for a note
for words in {commands}:
    try:
        main(words, standalone_mode=False)
    except SystemExit as end:
        assert not end.code, (words, end)
    found = {{"torch", "transformers"}} & set(sys.modules)
    assert not found, (words, found)
print("all imported neither")
"""


def test_read_only_commands_import_neither_torch_nor_transformers(root, make_run, built, tmp_path, monkeypatch):
    """On a run with a built cache and a noted fingerprint, including imports within functions."""
    shutil.copytree(built.folder, tmp_path / "caches" / built.folder.name, ignore=shutil.ignore_patterns("user-*"))
    run, run_file = make_run(), str(tmp_path / "run.yaml")
    Path(run_file).write_text(run.model_dump_json())
    monkeypatch.setattr("lookonce.datasets.images.now", lambda: float("inf"))
    open_run(run, Needs("tests", model="fingerprint"))
    read_only = [["status"], ["cache", "verify"], ["cache", "stage"]]
    commands = [[*words, run_file] for words in read_only]
    commands[-1].append(str(tmp_path / "staged"))
    done = run_python(READ_ONLY.format(commands=commands), root)
    assert done.stdout.endswith("all imported neither\n"), done.stderr


ARCHIVES = """
import sys
from pathlib import Path
from lookonce.datasets.images import index_images
from lookonce.datasets.records import Record

folder = Path(sys.argv[1])
index_images([Record((folder / "good.jpg",), ())])
print(*{"pyarrow", "torch"} & set(sys.modules))
paths = [archive / "0" for archive in sorted(folder.glob("*.*[rt]"))]
print(len(paths), len(index_images([Record(tuple(paths), ())]).key_of))
"""


def test_libraries_are_imported_with_the_first_archive_on_any_number_of_threads(tmp_path):
    for number in range(4):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            member = tarfile.TarInfo("0")
            member.size = len(b"tar")
            tar.addfile(member, io.BytesIO(b"tar"))
        parquet.write_table(pa.table({"pixels": pa.array([b"parquet"])}), tmp_path / f"{number}.parquet")
    (tmp_path / "good.jpg").write_bytes(b"good")
    command = [sys.executable, "-W", "error", "-c", ARCHIVES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["", "8 8"], done.stderr
