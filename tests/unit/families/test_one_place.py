"""What differs between families stands in their descriptions: no other module asks for the name of one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookonce.families.lookup import FAMILIES

SOURCES = ("cache", "datasets", "eval", "train", "src/lookonce")
NAME = re.compile(r"qwen\d(_\d)?_?vl|deepstack_visual|\bvisual\b|vision_(start|end)\b|image_pad|\bmodel_type\b", re.I)
"""Types and classes of families, and what they call their parts."""
ALLOWED = {
    "cache/model/pixels.py": {"qwen2_vl", "Qwen2VL"},  # made for one image processor, that of all families
    "cache/store/fingerprint.py": {"model_type"},  # a part of the tower's identity
    "datasets/sample/model.py": {"vision_start", "vision_end", "image_pad", "Qwen2VL"},  # it writes a tokenizer and
    # settings of that image processor
    "src/lookonce/adapter/card.py": {"visual"},  # the name of a task on the Hub
    "src/lookonce/selftest/model.py": {"vision_start", "vision_end", "image_pad"},  # its own model's tokens
}
"""What single modules may name, and why."""
ASKED = {"model_type"}
"""Names that are allowed everywhere as an attribute of a family, which code calls `family` or `DEFAULT`."""


def named(path: Path) -> set[str]:
    """The names of families in a module's code; texts in docstrings and messages for users do not count."""
    return {found for text in words(ast.parse(path.read_text())) for found in matches(text)}


def matches(text: str) -> Iterator[str]:
    return (found.group() for found in NAME.finditer(text))


def words(tree: ast.AST) -> Iterator[str]:
    """Identifiers, imported modules, and texts without blanks, which are no sentences."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield "" if node.attr in ASKED and is_family(node.value) else node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name for alias in node.names)
            yield getattr(node, "module", None) or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value


def is_family(node: ast.AST) -> bool:
    last = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return last in ("family", "DEFAULT")


def test_no_module_asks_for_the_name_of_a_family(root):
    found = {}
    for path in sorted(path for source in SOURCES for path in (root / source).rglob("*.py")):
        place = path.relative_to(root).as_posix()
        is_link = any(parent.is_symlink() for parent in path.parents)
        if not is_link and not place.startswith("src/lookonce/families/"):
            found[place] = named(path) - ALLOWED.get(place, set())
    assert {place: names for place, names in found.items() if names} == {}


def test_the_page_says_how_long_a_description_is(root):
    num_lines = len((root / "src/lookonce/families/qwen2_5_vl.py").read_text().splitlines())
    assert f"Those of Qwen2.5-VL and Qwen2-VL have {num_lines} lines." in (root / "docs" / "models.md").read_text()


def test_the_page_names_every_family(root):
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \|", (root / "docs" / "models.md").read_text(), re.M)
    assert rows == ["model_type", *FAMILIES]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("from transformers import Qwen2_5_VLModel", {"Qwen2_5_VL"}),
        ("import transformers.models.qwen2_vl", {"qwen2_vl"}),
        ('x = config.model_type == "qwen3_vl_moe"', {"model_type", "qwen3_vl"}),
        ("model.model.visual = None", {"visual"}),
        ('x = getattr(vision, "deepstack_visual_indexes")', {"deepstack_visual"}),
        ("kind = family.model_type", set()),
        ('"""As Qwen3VL does."""', set()),
    ],
)
def test_the_guard_sees_each_way_to_ask(tmp_path, line, names):
    (tmp_path / "module.py").write_text(line)
    assert named(tmp_path / "module.py") == names
