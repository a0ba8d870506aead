"""The family of a model, and that nothing else asks for its name."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.datasets.sample.model import SPECIAL_TOKENS, make_config, write_model
from lookonce.errors import ModelError, UsageError
from lookonce.families.lookup import DEFAULT, FAMILIES, family_in, family_of, family_of_tower

IDS = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
ALL = [pytest.param(family, id=family.model_type) for family in FAMILIES.values()]
SIZES = [(family, size) for family in FAMILIES.values() for size in family.sizes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    return tmp_path


@pytest.mark.parametrize("family", ALL)
def test_a_family_is_one_of_transformers(family):
    assert CONFIG_MAPPING[family.model_type] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    assert family.load(family.tower_class).main_input_name
    assert "tiny" in family.sizes


@pytest.mark.parametrize(("family", "size"), SIZES, ids=[f"{one.model_type} {size}" for one, size in SIZES])
def test_configurations_have_the_sizes_and_levels_of_their_description(family, size):
    config = make_config(size, IDS, family)
    assert family_of(config) is family
    levels, features = family.feature_shape(config.vision_config)
    assert features == config.text_config.hidden_size
    assert levels == (4 if family.has_deepstack else 1)
    heads = config.text_config.hidden_size // config.text_config.num_attention_heads
    rope = config.text_config.rope_parameters
    rotated = (getattr(config.text_config, "head_dim", None) or heads) * rope.get("partial_rotary_factor", 1)
    assert sum(rope["mrope_section"]) == rotated // 2


def test_the_family_of_a_folder_a_configuration_and_a_tower(folder):
    assert family_in(folder) is FAMILIES["qwen2_vl"]
    assert family_of(make_config("tiny", IDS)) is DEFAULT
    for written in ("qwen2_5_vl", "qwen2_5_vl_vision"):  # older and newer versions of transformers
        assert family_of_tower({"model_type": written}) is FAMILIES["qwen2_5_vl"]


@pytest.mark.parametrize("model_type", ["paligemma", None, 3, ["qwen3_vl"]])
def test_another_type_is_refused_with_those_that_are_known(folder, model_type):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=r"is of type .*, which lookonce does not support; supported: .*") as caught:
        family_in(folder)
    assert str(folder) in str(caught.value) and repr(model_type) in str(caught.value)
    assert all(f"{family.model_type} ({family.name})" in str(caught.value) for family in FAMILIES.values())


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_without_a_type_is_no_model_folder(folder, content):
    (folder / "config.json").write_text(content) if content else (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=f"{folder} is not a model folder: "):
        family_in(folder)


def test_a_family_that_transformers_lacks_is_refused_with_what_to_install(folder, monkeypatch):
    newer = replace(DEFAULT, model_type="qwen9_vl", name="Qwen9-VL")
    monkeypatch.setitem(FAMILIES, newer.model_type, newer)
    (folder / "config.json").write_text(json.dumps({"model_type": newer.model_type}))
    needs = f"transformers {version('transformers')} has no .*, which Qwen9-VL needs; install a newer one: pip install"
    for fails in (
        lambda: ModelFolder.open(str(folder)),
        lambda: make_config("tiny", IDS, newer),
        lambda: newer.load(newer.tower_class),
        lambda: DEFAULT.load("NoSuchTower"),
    ):
        with pytest.raises(ModelError, match=needs if fails.__code__.co_names[-1] != "load" else "has no .* needs"):
            fails()


def test_a_size_that_the_family_does_not_have_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no Qwen2-VL of size '8b'; choose one of tiny, 7b"):
        write_model(tmp_path, "8b", family=FAMILIES["qwen2_vl"])


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


@pytest.mark.guarantee("Only the description of a family asks for the name of the family; no other module does.")
def test_no_module_asks_for_the_name_of_a_family(root):
    found = {}
    for path in sorted(path for source in SOURCES for path in (root / source).rglob("*.py")):
        place = path.relative_to(root).as_posix()
        is_link = any(parent.is_symlink() for parent in path.parents)
        if not is_link and not place.startswith("src/lookonce/families/"):
            found[place] = named(path) - ALLOWED.get(place, set())
    assert {place: names for place, names in found.items() if names} == {}


def test_the_page_names_every_family_and_says_how_long_a_description_is(root):
    page = (root / "docs" / "models.md").read_text()
    assert re.findall(r"^\| [^|]+ \| `(\w+)` \|", page, re.M) == ["model_type", *FAMILIES]
    num_lines = len((root / "src/lookonce/families/qwen2_5_vl.py").read_text().splitlines())
    assert f"Those of Qwen2.5-VL and Qwen2-VL have {num_lines} lines." in page
