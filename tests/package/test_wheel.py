"""The wheel and the sdist: what is in them, and that the wheel works where no clone is."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from package.programs import run

FOLDERS = ("cache", "datasets", "eval", "train")
SHARED = ("docs/*.md", "docs/*.svg", "experiments/*.yaml", "slurm/*.s*", "slurm/container/*", "containers/*")
NOTHING_OF = ("tests/", "benchmarks/", ".git", "__pycache__", "site.env\n")


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def modules(source: Path) -> set[str]:
    """Every module and data file of the package, as the wheel names them."""
    below = [(path, path.relative_to(source / "src")) for path in (source / "src" / "lookonce").rglob("*")]
    for name in FOLDERS:
        below += [(path, Path("lookonce", path.relative_to(source))) for path in (source / name).rglob("*")]
    return {str(name) for path, name in below if path.is_file() and path.suffix != ".md"}


def test_the_build_prints_no_warning(built: tuple[Path, str]):
    harmless = "byte-compiling is disabled"  # with PYTHONDONTWRITEBYTECODE
    lines = [line for line in built[1].splitlines() if re.search(r"warning|deprecat|\*{4}", line, re.I)]
    assert [line for line in lines if harmless not in line] == []


def test_the_wheel_has_every_module_and_data_file_and_nothing_else(source: Path, names: set[str]):
    """It is made from the sdist, so the sdist has them too."""
    inside = {name for name in names if name.startswith("lookonce/")}
    assert inside == modules(source)
    assert {"lookonce/datasets/kvasir-vqa.yaml", "lookonce/datasets/sample/run.yaml", "lookonce/py.typed"} <= inside
    assert [name for name in names for part in NOTHING_OF if part in f"{name}\n"] == []


def test_a_wheel_made_without_the_sdist_is_the_same(source: Path, names: set[str], tmp_path: Path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, source, folder=tmp_path)
    [other] = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(other).namelist()) == names


def test_what_is_beside_the_package_is_in_the_wheel(source: Path, names: set[str]):
    found = {name.partition(".data/data/share/lookonce/")[2] for name in names} - {""}
    paths = [path for pattern in SHARED for path in source.glob(pattern) if path.is_file()]
    wanted = {str(path.relative_to(source)) for path in paths}
    assert wanted <= found and "slurm/site.env" not in found


def test_the_metadata_is_complete(wheel: Path, built: tuple[Path, str], tmp_path: Path):
    run(sys.executable, "-m", "twine", "check", "--strict", *built[0].iterdir(), folder=tmp_path)
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = Parser().parsestr(archive.read(name).decode())
    for key in ("Summary", "Author", "License-Expression", "License-File", "Keywords", "Requires-Python", "Classifier"):
        assert metadata[key], key
    assert len(metadata["Summary"]) < 512 and metadata["Description-Content-Type"] == "text/markdown"


def test_the_sdist_has_the_licence_and_no_tests(built: tuple[Path, str]):
    [path] = built[0].glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(path).getnames()}
    assert {"LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "SECURITY.md"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_the_wheel_trains_where_no_clone_is(installed: Path, tmp_path: Path):
    """`lookonce sample`, then the commands that it prints, in an empty folder."""
    program = installed / "lookonce"
    run(installed / "python", "-m", "pip", "check", folder=tmp_path)
    said = run(program, "sample", "data/sample", folder=tmp_path).stderr
    commands = [line.split()[1:] for line in said.splitlines() if line.startswith("  lookonce ")]
    assert [words[0] for words in commands] == ["cache", "train", "eval"]
    built, trained, scored = (run(program, *words, *faster(words), folder=tmp_path) for words in commands)
    assert "encoded 64 images" in built.stdout and "runs/sample/adapter" in trained.stdout
    assert re.search(r"^all +87 ", scored.stdout, re.M)
    assert (tmp_path / "runs" / "sample" / "report.html").exists()


def faster(words: list[str]) -> list[str]:
    return ["--set", "train.epochs=1"] if words[0] == "train" else []


def test_modules_import_without_a_clone(installed: Path, tmp_path: Path):
    code = "import lookonce as l; print(l.__file__, *[getattr(l, name) for name in l.__all__])"
    assert "site-packages" in run(installed / "python", "-W", "error", "-c", code, folder=tmp_path).stdout.split()[0]


def test_scripts_for_slurm_are_installed_and_find_the_command(installed: Path, tmp_path: Path):
    shared = installed.parent / "share" / "lookonce"
    script = f'. "{shared}/slurm/environment.sh" && command -v lookonce'
    found = run("bash", "-euc", script, folder=tmp_path, PATH=f"{installed}:/usr/bin:/bin").stdout
    assert found.strip() == str(installed / "lookonce")
    assert "Submit a whole run" in run(shared / "slurm" / "submit.sh", "--help", folder=tmp_path).stdout
    page = run(installed / "lookonce", "train", "-h", folder=tmp_path).stdout.splitlines()[-1].partition(": ")[2]
    assert Path(page).is_file()


def test_bash_completes_commands(installed: Path, tmp_path: Path):
    script = """
    eval "$(_LOOKONCE_COMPLETE=bash_source lookonce)"
    COMP_WORDS=(lookonce cache b) COMP_CWORD=2
    _lookonce_completion lookonce
    echo "${COMPREPLY[@]}"; complete -p lookonce
    """
    done = run("bash", "-c", script, folder=tmp_path, PATH=f"{installed}:/usr/bin:/bin")
    assert done.stdout.splitlines()[0] == "build" and "_lookonce_completion" in done.stdout


def test_uv_installs_it_as_a_tool(wheel: Path, root: Path, tmp_path: Path):
    folders = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    constraints = root / "constraints.txt"
    words = ["tool", "install", "--python", sys.executable, "--constraints", constraints, wheel]
    run(sys.executable, "-m", "uv", *words, folder=tmp_path, **folders)
    sample = run(tmp_path / "bin" / "lookonce", "sample", "s", folder=tmp_path)
    assert "66 images" in sample.stdout and (tmp_path / "s" / "run.yaml").exists()
