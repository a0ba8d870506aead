"""Wheel and sdist, built once from a copy of the repository, and an environment with nothing but the wheel.

They need a package index and minutes, so they are not part of `make test`: `make package-test` and `make test-lowest`
install what they need (the extra `package`) and run them. Without it they are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from package.programs import run

HERE = Path(__file__).parent
NEEDED = ("build", "twine", "uv")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("package")
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"no {', '.join(missing)}; run: make package-test"))


@pytest.fixture(scope="session")
def source(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows or would add, in a folder where nothing else is."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    folder = tmp_path_factory.mktemp("source")
    for name in names:
        if os.path.lexists(root / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the sdist and the wheel made from it, and what the build printed."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--outdir", folder, source, folder=folder)
    return folder, done.stdout + done.stderr


@pytest.fixture(scope="session")
def wheel(built: tuple[Path, str]) -> Path:
    [path] = built[0].glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder `bin` of an environment in which pip has installed the wheel, in the tested versions."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    program = folder / "venv" / "bin" / "python"
    constraints = root / os.environ.get("CONSTRAINTS", "constraints.txt")
    run(program, "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel, folder=folder)
    yield program.parent
    shutil.rmtree(folder)
