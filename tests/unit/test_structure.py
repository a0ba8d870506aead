"""Guards of the repository's structure: imports, layers, file sizes, and agreement between files."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

import lookonce

LINKED = ("cache", "datasets", "eval", "train")
"""The top-level source folders, linked from src/lookonce."""
LAYERS = (
    "datasets",
    "cache",
    "run.sections run.grpo",
    "train.data",
    "run",
    "train",
    "eval",
    "bench selftest status summary library",
    "checks proposal report",
    "workflow adapter fetch",
    "study",
    "commands",
    "cli __main__ runner",
)
"""Layers from the bottom up; folders of one layer may import each other. Shared modules are below all. What turns
records into batches is below an open run, which has it, and the keys of a run file are below both."""
ORDER = {
    "cache": ("format", "model", "store", "build", "maintenance"),
    "train": ("data", "model", "loop", "train"),
    "eval": tuple("statistics decoding scores answers answerer predict join compare submission run samples".split()),
}
"""The packages and modules of each folder, from the bottom up."""


def sources(root: Path) -> list[Path]:
    """All modules, once each: those of src/lookonce/ without its links, and those of the linked folders."""
    folders = [root / name for name in LINKED] + [root / "src" / "lookonce"]
    return [path for folder in folders for path in sorted(folder.rglob("*.py")) if not _is_behind_a_link(path, folder)]


def _is_behind_a_link(path: Path, folder: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(folder))


def module_name(path: Path, root: Path) -> str:
    below = path.relative_to(root / "src") if path.is_relative_to(root / "src") else "lookonce" / path.relative_to(root)
    return ".".join(below.with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, root: Path) -> set[str]:
    """Our modules that a module imports, also within functions and for type checking."""
    known = all_modules(root)
    return {name if name in known else name.rpartition(".")[0] for name in content(path)[0]}


def imported_names(tree: ast.AST) -> set[str]:
    """What is imported from lookonce: modules, or names in modules."""
    names: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lookonce":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "lookonce"}
    return names


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements within a module or a statement; to walk through the expressions too takes longer than to parse."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


@functools.cache
def content(path: Path) -> tuple[set[str], str]:
    """The names that a module imports from lookonce, and its docstring."""
    tree = ast.parse(path.read_text())
    return imported_names(tree), ast.get_docstring(tree) or ""


@functools.cache
def all_modules(root: Path) -> frozenset[str]:
    return frozenset(module_name(path, root) for path in sources(root))


def height(name: str) -> int:
    """The number of a module's layer; 0 for shared modules. The package itself, with the public API, is above all."""
    if name == "lookonce":
        return len(LAYERS) + 1
    _, folder, inner = f"{name}..".split(".")[:3]
    found = [number for number, layer in enumerate(LAYERS, start=1) if {folder, f"{folder}.{inner}"} & {*layer.split()}]
    return next(
        (number for number in found if f"{folder}.{inner}" in LAYERS[number - 1].split()), max(found, default=0)
    )


@pytest.mark.parametrize("package", LINKED)
def test_the_import_name_links_to_the_top_level_folder(root, package):
    link = root / "src" / "lookonce" / package
    assert link.is_symlink() and link.readlink() == Path("../..") / package
    assert (root / package / "__init__.py").exists() == (package != "datasets")


def test_all_names_of_the_public_api_import():
    assert all(getattr(lookonce, name) for name in lookonce.__all__)
    imported = content(Path(lookonce.__file__))[0] - {"lookonce.version.__version__"}  # for type checkers
    assert imported == {
        f"lookonce.{module}.{name}" for module, names in lookonce._NAMES.items() for name in names.split()
    }


def test_imports_run_one_way(root):
    """A module imports only modules of its own layer, of lower layers, and shared ones."""
    found = {path: sorted(imported(path, root)) for path in sources(root)}
    upward = [
        f"{path.relative_to(root)} imports {name}"
        for path, names in found.items()
        for name in names
        if height(name) > height(module_name(path, root))
    ]
    assert upward == []


def test_packages_of_a_folder_do_not_import_upward(root):
    upward = []
    for path in sources(root):
        mine = module_name(path, root).split(".")
        order = ORDER.get(mine[1] if len(mine) > 1 else "", ())
        for name in imported(path, root):
            other = name.split(".")
            if order and other[1:2] == mine[1:2] and len(other) > 2 and len(mine) > 2:
                assert {mine[2], other[2]} <= set(order), f"{path}: add its package to ORDER"
                if order.index(other[2]) > order.index(mine[2]):
                    upward.append(f"{path.relative_to(root)} imports {name}")
    assert upward == []


def test_no_module_imports_itself_through_others(root):
    imports = {module_name(path, root): imported(path, root) for path in sources(root)}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_no_file_has_more_than_600_lines(root):
    everything = [*sources(root), *sorted((root / "tests").rglob("*.py")), *sorted((root / "benchmarks").glob("*.py"))]
    assert [str(path.relative_to(root)) for path in everything if len(path.read_text().splitlines()) > 600] == []


@pytest.mark.parametrize("folder", ["benchmarks", "tests/integration", "tests/slurm"])
def test_scripts_import_names_that_exist(root, folder):
    """Benchmarks, and programs of tests, run too seldom to notice a name that was renamed."""
    for path in sorted((root / folder).rglob("*.py")):
        for name in content(path)[0] - all_modules(root):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), f"{path}: {name}"


def test_tests_mirror_the_packages(root):
    """Every folder of unit tests is a folder of the source, so that a module's tests are found by its path."""
    packages = {Path(*module_name(path, root).split(".")[1:-1]) for path in sources(root)} | {Path("shared"), Path()}
    tests = {path.parent.relative_to(root / "tests" / "unit") for path in (root / "tests" / "unit").rglob("test_*.py")}
    assert tests <= packages, tests - packages


def test_pytest_enters_every_folder_of_tests(root, pytestconfig):
    skipped = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in (root / "tests").rglob("test_*.py")}
    names = {name for folder in folders for name in folder.relative_to(root).parts}
    assert [name for name in sorted(names) if any(fnmatch(name, pattern) for pattern in skipped)] == []


def test_every_module_has_a_docstring_and_every_package_lists_its_modules(root):
    assert [path for path in sources(root) if not content(path)[1]] == []
    for init in (path for path in sources(root) if path.name == "__init__.py" and path.parent.name != "lookonce"):
        listed = set(re.findall(r"^(\w+) {2,}\w", content(init)[1], re.M))
        inside = init.parent.iterdir()
        names = {path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert listed == names - {"__init__", "__pycache__"}, init


def test_ci_runs_the_commands_of_contributing(root):
    script, text = (root / ".ci" / "run").read_text(), (root / "CONTRIBUTING.md").read_text()
    for command in ("make check", "make test", "make docs", "make slurm-test", "make qlora-test"):
        assert f"\n{command}\n" in script and f"`{command}`" in text


def test_the_sample_run_is_what_make_runs_by_default(root):
    makefile = (root / "Makefile").read_text()
    assert "RUN ?= experiments/sample.yaml" in makefile
    run = yaml.safe_load((root / "experiments" / "sample.yaml").read_text())
    assert run["model"]["path"] == "data/sample/model" and "sample data/sample" in makefile
