"""The family of a model is found by its type; what is not known, or what transformers lacks, is refused by name."""

from __future__ import annotations

import json
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
