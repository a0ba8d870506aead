"""Guards: what holds the house together and breaks in silence."""

from __future__ import annotations

import ast
import math
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from lookonce.train.model_source import find_fingerprint

PACKAGES = ("cache", "datasets", "train")
LAYERS = {"datasets": 0, "cache": 1, "train": 2}
CACHE_LAYERS = {"model": 0, "store": 1, "make": 2, "care": 3}
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LOG.md", "cache/FORMAT.md", "slurm/README.md")


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """With the repository's root on the path, as `python -c` and `python -m` have it."""
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)


def sources(root: Path) -> list[Path]:
    return [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]


@pytest.mark.parametrize("package", PACKAGES)
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
    code = "import sys, lookonce.cli, lookonce.train.run_file; print({'torch', 'transformers'} & set(sys.modules))"
    assert run_python(code, root).stdout.strip() == "set()"


LOOK = """
import math, sys
from lookonce.cache.store import known
from lookonce.cli import main
known.now = lambda: math.inf  # the sample may be of this very moment
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
    monkeypatch.setattr("lookonce.cache.store.known.now", lambda: math.inf)
    find_fingerprint(run)
    looks = [["status"], ["cache", "status"], ["cache", "verify"], ["cache", "stage"]]
    commands = [[*look, run_file] for look in looks]
    commands[-1].append(str(tmp_path / "staged"))
    done = run_python(LOOK.format(commands=commands), root)
    assert done.stdout.endswith("all looked\n"), done.stderr


def test_imports_run_one_way(root):
    for path in sources(root):
        package = path.relative_to(root).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = node.module.split(".")
                if parts[0] == "lookonce" and len(parts) > 1:
                    assert LAYERS.get(parts[1], -1) <= LAYERS[package], f"{path} imports {node.module}"
                    assert parts[1] != "cli", f"{path} imports the command line"


def test_no_module_imports_itself_by_way_of_others(root):
    names = {path: ".".join(("lookonce", *path.relative_to(root).with_suffix("").parts)) for path in sources(root)}
    imports = {
        name.removesuffix(".__init__"): set(re.findall(r"^ *from (lookonce\.\S+) import ", path.read_text(), re.M))
        for path, name in names.items()
    }
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_imports_within_the_cache_run_one_way(root):
    for path in sorted((root / "cache").glob("*/*.py")):
        layer = CACHE_LAYERS[path.parent.name]
        for module in re.findall(r"lookonce\.cache\.(\w+)", path.read_text()):
            assert CACHE_LAYERS.get(module, -1 if module == "names" else 9) <= layer, f"{path} imports {module}"


def test_the_packages_list_their_files(root):
    of_cache = [root / "cache" / name for name in CACHE_LAYERS]
    of_data = [root / "datasets" / name for name in ("audit", "forms", "prepare")]
    for package in [root / "train", root / "cache", root / "src" / "lookonce" / "commands", *of_cache, *of_data]:
        listed = set(
            re.findall(r"^(\w+) {2,}\w", ast.get_docstring(ast.parse((package / "__init__.py").read_text())), re.M)
        )
        files = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert listed == files - {"__init__", "__pycache__"}, package


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
