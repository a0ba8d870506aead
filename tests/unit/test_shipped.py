"""What is shipped beside the package: containers, a task for clouds, a wheel's data, release notes, pinned versions."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

TASK_KEYS = {"name", "resources", "workdir", "envs", "file_mounts", "setup", "run"}
RESOURCE_KEYS = {"accelerators", "disk_size"}
"""Keys of SkyPilot's schema (sky/utils/schemas.py, 0.14) that the task may use."""
SECTIONS = {"files", "post", "environment", "runscript", "test", "labels", "help"}


@pytest.fixture(scope="module")
def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def dockerfile(root: Path) -> str:
    return (root / "containers" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def definition(root: Path) -> str:
    return (root / "containers" / "lookonce.def").read_text()


def installed(text: str) -> list[str]:
    return re.findall(r"^\s*(?:&& |RUN )?(pip install .*?)(?: \\)?$", text, re.M)


def test_both_images_have_the_same_base_packages_and_variables(dockerfile, definition):
    [base] = re.findall(r"^ARG BASE=(\S+)$", dockerfile, re.M)
    assert f"\nFrom: {base}\n" in definition and ":" in base and not base.endswith("latest")
    assert len(installed(dockerfile)) == 1 and installed(dockerfile) == installed(definition)
    for text in (dockerfile, definition):
        assert "gcc libc6-dev" in text and "PYTHONNOUSERSITE=1" in text


def test_images_have_the_versions_for_gpus_and_extras_that_exist(dockerfile, project):
    [command] = installed(dockerfile)
    [extras] = re.findall(r"\[(.+)\]", command)
    assert "--constraint /opt/lookonce/constraints-gpu.txt" in command
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()


def test_the_image_runs_as_a_user_and_gets_only_what_it_installs(dockerfile, root):
    users = re.findall(r"^USER (\S+)$", dockerfile, re.M)
    assert users == ["1000"] and "--uid 1000" in dockerfile
    [copied] = re.findall(r"^COPY (.+) \S+$", dockerfile, re.M)
    ignored = (root / "containers" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in ignored if not line.startswith("#")]
    assert rules == ["*", *sorted(f"!{name}" for name in copied.split())]


def test_nothing_secret_is_in_what_makes_images(root):
    for path in (root / "containers").iterdir():
        assert not re.search(r"(token|password|secret|_key)\s*[=:]\s*\S", path.read_text(), re.I), path


def test_the_definition_has_every_section_once_and_copies_files_that_exist(definition, root):
    assert definition.startswith("Bootstrap: docker\nFrom: ")
    sections = re.findall(r"^%(\w+)$", definition, re.M)
    assert len(sections) == len(set(sections)) and set(sections) == SECTIONS
    files = re.search(r"^%files\n(.*?)^%", definition, re.M | re.S)[1].split()
    assert {name for name in files[::2] if not (root / name).exists()} <= {"dist"}, "dist is made by make dist"


def test_the_task_for_clouds_has_keys_of_its_schema_and_runs_what_exists(root):
    task = yaml.safe_load((root / "containers" / "sky.yaml").read_text())
    assert task.keys() <= TASK_KEYS and task["resources"].keys() <= RESOURCE_KEYS
    assert all(isinstance(number, int) for number in task["resources"]["accelerators"].values())
    assert (root / task["workdir"]).is_dir() and "make setup" in task["setup"]
    assert set(re.findall(r"\$\{?(\w+)", task["run"])) == task["envs"].keys()


def test_a_wheel_carries_every_script_run_file_page_and_container(root, project):
    """Patterns of pyproject.toml that match nothing, or folders that have no pattern, are not noticed by setuptools."""
    carried = {}
    for target, patterns in project["tool"]["setuptools"]["data-files"].items():
        for pattern in patterns:
            found = [path for path in root.glob(pattern) if path.is_file()]
            assert found, pattern
            carried |= {str(path.relative_to(root)): target for path in found}
    for name, target in carried.items():
        assert target == str(Path("share/lookonce", name).parent), name
    wanted = {path for folder in ("slurm", "experiments", "containers") for path in (root / folder).rglob("*")}
    names = {str(path.relative_to(root)) for path in wanted if path.is_file() and path.name != "site.env"}
    assert names - carried.keys() == set() and "slurm/site.env" not in carried


def test_the_author_is_that_of_the_citation(root, project):
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    assert project["project"]["authors"] == citation["authors"]
    assert project["project"]["license"] == citation["license"]


CHANGELOG = """# Changelog

## Unreleased

## 2.0.0 (2030-01-02)

- `train` is new ([page](docs/training.md#x), [elsewhere](https://example.org)).

## 1.0.0 (2029-01-02)

- Old.
"""
CITATION = 'title: "x"\nversion: 2.0.0\ndate-released: "2030-01-02"\n'


@pytest.fixture(scope="module")
def release(root: Path):
    spec = importlib.util.spec_from_file_location("release", root / "tests" / "package" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_release_notes_are_the_part_of_the_changelog_without_links_that_would_break(release):
    assert release.notes(CHANGELOG, "2.0.0") == "- `train` is new (page, [elsewhere](https://example.org)).\n"
    assert release.notes(CHANGELOG, "1.0.0") == "- Old.\n"


@pytest.mark.parametrize(
    ("old", "new", "project", "changed", "problem"),
    [
        ("", "", {"urls": {}}, "", None),
        ("Unreleased\n", "Unreleased\n\n- New.\n", {"urls": {}}, "", "entries under Unreleased"),
        ("2.0.0", "2.0.1", {"urls": {}}, "", "no `## 2.0.0 (DATE)`"),
        ("", "", {}, "", "add [project.urls]"),
        ("", "", {"urls": {}}, " M train.py\n", "not committed:\n M train.py"),
    ],
)
def test_what_is_not_ready_stops_a_release(release, old, new, project, changed, problem):
    changelog = CHANGELOG.replace(old, new) if old else CHANGELOG
    found = release.problems(changelog, "2.0.0", CITATION, project, changed)
    assert len(found) == (problem is not None) and all(problem in one for one in found)
    citation = CITATION.replace("2030", "2029")
    assert release.problems(CHANGELOG, "2.0.0", citation, {"urls": {}}, "") == [
        "CITATION.cff has no line `date-released: 2030-01-02`"
    ]


def test_all_checks_run_before_a_release_that_is_not_ready_is_refused(release, monkeypatch, capsys):
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=" M train.py\n"))
    for arguments, status, said in ((["release.py"], 0, "run all the same"), (["", "notes.md"], 1, "have passed")):
        monkeypatch.setattr("sys.argv", arguments)
        assert release.main() == status
        printed = capsys.readouterr()
        assert "not committed:\n M train.py" in printed.err and said in printed.err and printed.out == ""


def test_make_release_uploads_nothing(root):
    makefile = (root / "Makefile").read_text()
    assert "release.py build/notes.md" in makefile and "twine upload" not in makefile


# What `make setup` installs.

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
def test_the_pinned_versions_are_allowed_and_complete(root, project, name):
    versions = pinned(root / name)
    required = sum(project["project"]["optional-dependencies"].values(), project["project"]["dependencies"])
    for requirement in map(Requirement, required):
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
