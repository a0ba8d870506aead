"""`make setup` installs the versions that were tested on a GPU where there is one, and both sets fit the project."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

FILES = ("constraints.txt", "constraints-gpu.txt")
ONLY_ON_CPU = {"httpcore2", "httpx2", "truststore"}
"""What only newer versions of huggingface_hub need."""
ONLY_ON_GPU = {"cuda-bindings", "cuda-pathfinder", "httpcore", "httpx", "setuptools", "triton"}
"""What torch with CUDA and the older huggingface_hub need."""


def pinned(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


def test_both_files_pin_the_same_packages(root):
    cpu, gpu = (set(pinned(root / name)) for name in FILES)
    assert cpu - gpu == ONLY_ON_CPU, "add them to constraints-gpu.txt"
    assert gpu - cpu == ONLY_ON_GPU, "remove them from constraints-gpu.txt"


def test_the_versions_for_gpus_are_those_of_the_reports(root):
    report = (root / "benchmarks" / "qwen3-vl-2b_h200_2026-11-20.md").read_text()
    versions = pinned(root / "constraints-gpu.txt")
    assert f"torch {versions['torch']}+cu130, transformers {versions['transformers']}" in report
    assert f"peft {versions['peft']}, accelerate {versions['accelerate']}" in report


@pytest.mark.parametrize("name", FILES)
def test_the_pinned_versions_are_allowed_and_complete(root, name):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = [item for items in project["optional-dependencies"].values() for item in items]
    versions = pinned(root / name)
    for requirement in map(Requirement, project["dependencies"] + extras):
        assert versions[requirement.name.lower().replace("_", "-")] in requirement.specifier, requirement


@pytest.fixture
def make(root, tmp_path, monkeypatch):
    """Prints what `make setup` would do in a folder of its own, with or without a GPU."""
    for name in (*FILES, "Makefile", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)
    monkeypatch.delenv("CONSTRAINTS", raising=False)
    for name in [name for name in os.environ if name.startswith("MAKE") or name == "MFLAGS"]:
        monkeypatch.delenv(name)

    def run(*words: str, smi: str = "exit 9") -> str:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{smi}\n")
        tool.chmod(0o755)
        environment = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["make", "-n", "setup", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    return run


GPU = 'test "$*" = -L && echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"'


@pytest.mark.parametrize(
    ("smi", "words", "file", "said"),
    [
        (GPU, (), "constraints-gpu.txt", "found a GPU"),
        ("exit 9", (), "constraints.txt", "found no GPU"),
        ("echo No devices were found", (), "constraints.txt", "found no GPU"),
        ("exit 9", ("CONSTRAINTS=constraints-gpu.txt",), "constraints-gpu.txt", "found no GPU"),
    ],
)
def test_make_setup_chooses_the_file_and_says_so(make, smi, words, file, said):
    lines = make(*words, smi=smi)
    assert f"--constraint {file} " in lines and f'"{said}: installing the versions in {file}"' in lines


def test_another_set_that_is_named_is_installed_and_the_same_one_is_not_installed_again(make, tmp_path):
    ready = tmp_path / ".venv" / ".ready"
    ready.parent.mkdir()
    ready.write_text("constraints-gpu.txt\n")
    assert "pip install" not in make() and "pip install" not in make("CONSTRAINTS=constraints-gpu.txt")
    assert "--constraint constraints.txt " in make("CONSTRAINTS=constraints.txt")
