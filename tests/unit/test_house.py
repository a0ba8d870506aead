"""Guards: what holds the house together and breaks in silence."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from lookonce.run.model_ref import find_fingerprint

LINKED = ("cache", "datasets", "eval", "train")
"""The phases: top-level folders, linked from src/lookonce."""
LAYERS = ("datasets", "cache", "run", "train", "eval", "bench status", "workflow", "commands", "cli __main__")
"""From the bottom up; folders of one line may import each other. The shared modules of src/lookonce are below all."""
ROOMS = {
    "cache": ("constants", "model", "store", "build", "maintenance"),
    "train": ("data", "model", "loop", "train"),
    "eval": ("scores", "answers", "run"),
}
"""The rooms of a folder from the bottom up."""
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LOG.md", "cache/FORMAT.md", "slurm/README.md")


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """With the repository's root on the path, as `python -c` and `python -m` have it."""
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)


def sources(root: Path) -> list[Path]:
    """All modules, once each: src/lookonce/ without its links, and what they lead to."""
    folders = [root / name for name in LINKED] + [root / "src" / "lookonce"]
    return [path for folder in folders for path in sorted(folder.rglob("*.py")) if not _is_behind_a_link(path, folder)]


def _is_behind_a_link(path: Path, folder: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(folder))


def module_name(path: Path, root: Path) -> str:
    below = path.relative_to(root / "src") if path.is_relative_to(root / "src") else "lookonce" / path.relative_to(root)
    return ".".join(below.with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, root: Path) -> set[str]:
    """The modules of ours that a module imports, within functions and for type checking too."""
    known = all_modules(root)
    return {name if name in known else name.rpartition(".")[0] for name in imported_names(ast.parse(path.read_text()))}


def imported_names(tree: ast.AST) -> set[str]:
    """What is imported of ours: modules, or names in them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lookonce":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "lookonce"}
    return names


@functools.cache
def all_modules(root: Path) -> frozenset[str]:
    return frozenset(module_name(path, root) for path in sources(root))


def height(name: str) -> int:
    """The layer of a module; 0 for the shared ones. The package itself, with the public API, is above all."""
    if name == "lookonce":
        return len(LAYERS) + 1
    part = f"{name}.".split(".")[1]
    return next((number for number, layer in enumerate(LAYERS, start=1) if part in layer.split()), 0)


@pytest.mark.parametrize("package", LINKED)
def test_the_import_name_links_to_the_top_level_folder(root, package):
    link = root / "src" / "lookonce" / package
    assert link.is_symlink() and link.readlink() == Path("../..") / package


def test_datasets_is_no_package_of_its_own(root):
    assert not (root / "datasets" / "__init__.py").exists()


def test_our_datasets_folder_does_not_pose_as_hugging_faces_library(root):
    done = run_python("import lookonce, transformers.utils as u; print(u.is_datasets_available())", root)
    found = run_python("import datasets; print(datasets.__file__)", root.parent)
    is_installed = found.returncode == 0 and found.stdout.strip() != "None"
    assert done.stdout.split()[-1] == str(is_installed), done.stderr


def test_all_names_of_the_public_api_import(root):
    code = "import lookonce as l; print(all(getattr(l, n) for n in l.__all__), *set(l.__all__) ^ set(l._HOME))"
    assert run_python(code, root).stdout.split() == ["True", "__version__"]


def test_help_imports_neither_torch_nor_transformers(root):
    code = "import sys, lookonce.cli, lookonce.run.config; print({'torch', 'transformers'} & set(sys.modules))"
    assert run_python(code, root).stdout.strip() == "set()"


LOOK = """
import math, sys
from lookonce.cache.store import fingerprint_notes
from lookonce.cli import main
fingerprint_notes.now = lambda: math.inf  # the sample may be of this very moment
for words in {commands}:
    try:
        main(words, standalone_mode=False)
    except SystemExit as end:
        assert not end.code, (words, end)
    found = {{"torch", "transformers"}} & set(sys.modules)
    assert not found, (words, found)
print("all looked")
"""


def test_who_only_looks_loads_neither_torch_nor_transformers(root, make_run, built, tmp_path, monkeypatch):
    """On a run whose cache is built and whose fingerprint is noted; within functions too, where torch is imported."""
    shutil.copytree(built.folder, tmp_path / "caches" / built.folder.name)
    run, run_file = make_run(), str(tmp_path / "run.yaml")
    Path(run_file).write_text(run.model_dump_json())
    monkeypatch.setattr("lookonce.cache.store.fingerprint_notes.now", lambda: float("inf"))
    find_fingerprint(run)
    looks = [["status"], ["cache", "status"], ["cache", "verify"], ["cache", "stage"]]
    commands = [[*look, run_file] for look in looks]
    commands[-1].append(str(tmp_path / "staged"))
    done = run_python(LOOK.format(commands=commands), root)
    assert done.stdout.endswith("all looked\n"), done.stderr


def test_imports_run_one_way(root):
    """A folder imports those below it, its own rooms in their order, and the shared modules; nothing in a circle."""
    found = {path: sorted(imported(path, root)) for path in sources(root)}
    upward = [
        f"{path.relative_to(root)} imports {name}"
        for path, names in found.items()
        for name in names
        if height(name) > height(module_name(path, root))
    ]
    assert upward == []


def test_rooms_of_a_folder_do_not_import_upward(root):
    upward = []
    for path in sources(root):
        mine = module_name(path, root).split(".")
        order = ROOMS.get(mine[1] if len(mine) > 1 else "", ())
        for name in imported(path, root):
            other = name.split(".")
            if order and other[1:2] == mine[1:2] and len(other) > 2 and len(mine) > 2:
                assert {mine[2], other[2]} <= set(order), f"{path}: add its room to ROOMS"
                if order.index(other[2]) > order.index(mine[2]):
                    upward.append(f"{path.relative_to(root)} imports {name}")
    assert upward == []


def test_no_module_imports_itself_by_way_of_others(root):
    imports = {module_name(path, root): imported(path, root) for path in sources(root)}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("datasets", "import lookonce.commands.cache"),
        ("cache", "from lookonce import run"),
        ("train", "from lookonce.eval.run import evaluate"),
        ("train", "import lookonce.bench.step_time as bench"),
        ("run", "from lookonce.train.model import load"),
        ("", "from lookonce.cache.constants import FORMAT_VERSION"),
    ],
)
def test_the_guard_of_layers_sees_every_kind_of_import(package, line):
    (name,) = imported_names(ast.parse(line))
    assert height(name) > height(f"lookonce.{package}.x" if package else "lookonce.text")


def test_no_file_is_longer_than_300_lines_and_no_room_holds_more_than_15(root):
    everything = [*sources(root), *sorted((root / "tests").rglob("*.py")), *sorted((root / "benchmarks").glob("*.py"))]
    long = {
        str(path.relative_to(root)): num for path in everything if (num := len(path.read_text().splitlines())) > 300
    }
    rooms = Counter(path.parent for path in everything)
    full = {str(room.relative_to(root)): number for room, number in rooms.items() if number > 15}
    assert (long, full) == ({}, {})


def test_tests_mirror_the_rooms(root):
    """Every folder of unit tests is a folder of the source, so that a module's tests are found by its place."""
    rooms = {Path(*module_name(path, root).split(".")[1:-1]) for path in sources(root)} | {Path("shared"), Path()}
    tests = {path.parent.relative_to(root / "tests" / "unit") for path in (root / "tests" / "unit").rglob("test_*.py")}
    assert tests <= rooms, tests - rooms


def test_the_packages_list_their_files(root):
    for init in (path for path in sources(root) if path.name == "__init__.py" and path.parent.name != "lookonce"):
        listed = set(re.findall(r"^(\w+) {2,}\w", ast.get_docstring(ast.parse(init.read_text())), re.M))
        inside = init.parent.iterdir()
        names = {path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert listed == names - {"__init__", "__pycache__"}, init


def test_every_module_says_what_it_is_for(root):
    assert [path for path in sources(root) if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_links_in_markdown_lead_somewhere(root):
    for page in [root / name for name in PAGES] + sorted((root / "benchmarks").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert re.match(r"https?://", target) or (page.parent / target).exists(), f"{page}: {target}"


def test_the_readmes_tree_is_the_repository(root):
    text = (root / "README.md").read_text()
    tree = re.search(r"```\n(src/.*?)```", text, re.S).group(1)
    named = {line.split()[0] for line in tree.splitlines() if line.strip()}
    assert all((root / name).exists() for name in named), named
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if tracked.returncode == 0:
        folders = {f"{line.split('/')[0]}/" for line in tracked.stdout.splitlines() if "/" in line} - {".ci/"}
        assert folders <= named | {"src/"}, folders - named


def test_the_readmes_commands_exist(root):
    text = "\n".join((root / name).read_text() for name in PAGES)
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    asked = set(re.findall(r"^make ([a-z-]+)", text, re.M)) | set(re.findall(r"`make ([a-z-]+)", text))
    assert asked and asked <= targets, asked - targets


def test_ci_runs_the_commands_of_the_readme(root):
    script, text = (root / ".ci" / "run").read_text(), (root / "README.md").read_text()
    for command in ("make check", "make test", "make slurm-test"):
        assert f"\n{command}\n" in script and command in text


def test_the_sample_run_is_what_make_runs_by_default(root):
    makefile = (root / "Makefile").read_text()
    assert "RUN ?= experiments/sample.yaml" in makefile
    run = yaml.safe_load((root / "experiments" / "sample.yaml").read_text())
    assert run["model"]["path"] == "data/sample/model" and "sample data/sample" in makefile


def test_versions_are_pinned_as_the_project_allows_them(root):
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    extras = [item for items in project["optional-dependencies"].values() for item in items]
    for requirement in map(Requirement, project["dependencies"] + extras):
        assert pinned[requirement.name.lower().replace("_", "-")] in requirement.specifier, requirement
    assert pinned["torch"] == "2.13.0"
