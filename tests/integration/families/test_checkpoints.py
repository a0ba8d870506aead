"""In each family, files with published or newer names load whole; a tensor that they lack is named in an error."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import hash_language_model
from lookonce.errors import ModelError
from lookonce.families.lookup import FAMILIES
from lookonce.run.sections import LoraSection
from lookonce.train.model.load import add_lora, load_with_tower, load_without_tower

TENSOR_IS_NAMED = pytest.mark.guarantee(
    "A tensor that a checkpoint lacks, or has in another shape, is an error that names the tensor: in each "
    "family, with published and newer names, in any number of files."
)

Tensors = dict[str, torch.Tensor]
NUM_FILES = 3
EXPERT = re.compile(r"\.experts\.\d+\.(\w+)\.weight$")


def sharded(source: Path, place: Path, tensors: Tensors) -> ModelFolder:
    """The model with other tensors, in several files."""
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("*.safetensors"))
    files = {name: f"model-{number % NUM_FILES}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        some = {name: tensors[name].contiguous() for name in files if files[name] == file}
        save_file(some, place / file, {"format": "pt"})
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return ModelFolder.open(str(place))


def new_names(tensors: Tensors) -> Tensors:
    """As transformers 5 names modules: `model.visual` and `model.language_model`."""

    def renamed(name: str) -> str:
        if name.startswith("visual."):
            return f"model.{name}"
        has_part = name.startswith(("model.visual.", "model.language_model.", "lm_head."))
        return name if has_part else name.replace("model.", "model.language_model.", 1)

    return {renamed(name): tensor for name, tensor in tensors.items()}


def published(tensors: Tensors) -> Tensors:
    """The layout of published files: all experts in one tensor, whose matrices are transposed in Qwen3-VL's."""
    each = {name: tensor for name, tensor in tensors.items() if EXPERT.search(name)}
    found = {name: tensor for name, tensor in tensors.items() if name not in each}
    if not each:
        return {name: tensor.transpose(1, 2) if ".experts." in name else tensor for name, tensor in found.items()}
    for name in in_model(each):
        place, _, joined = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if joined == "gate_up_proj" else (joined,)
        numbers = range(sum(other.startswith(f"{place}.") for other in each) // 3)
        experts = [torch.cat([each[f"{place}.{number}.{part}.weight"] for part in parts]) for number in numbers]
        found[name] = torch.stack(experts)
    return found


def in_model(names: Iterable[str]) -> set[str]:
    """The names that the model has for these tensors: some files have one for each expert."""

    def joined(found: re.Match[str]) -> str:
        return ".experts.down_proj" if found[1] == "down_proj" else ".experts.gate_up_proj"

    return {EXPERT.sub(joined, name) for name in names}


@pytest.mark.parametrize("layout", [new_names, published])
def test_published_and_newer_files_give_the_same_model(site, tmp_path, layout):
    tensors = load_file(site.model / "model.safetensors")
    one, other = ModelFolder.open(str(site.model)), sharded(site.model, tmp_path / "model", layout(tensors))
    for load in (load_without_tower, load_with_tower):
        expected, found = (load(folder, torch.float32).state_dict() for folder in (one, other))
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    towers = [Tower(folder, torch.float32).module.state_dict() for folder in (one, other)]
    assert all(torch.equal(towers[1][name], weight) for name, weight in towers[0].items())


@pytest.mark.parametrize("site", [FAMILIES["qwen2_5_vl"], FAMILIES["qwen2_vl"]], ids=["2.5", "2"], indirect=True)
def test_published_configurations_give_the_same_model(site, tmp_path):
    """Those of these families have the keys of the language model beside the others."""
    path = Path(shutil.copytree(site.model, tmp_path / "model")) / "config.json"
    config = json.loads(path.read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text.pop("rope_parameters")
    sections = {"mrope_section": rope["mrope_section"]}
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope"} | sections}
    text |= {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
    for name in ("layer_types", "model_type", "dtype"):
        text.pop(name, None)
    config["vision_config"] = {name: vision[name] for name in vision if name not in ("model_type", "rope_parameters")}
    path.write_text(json.dumps(text | config))
    folders = [ModelFolder.open(str(folder)) for folder in (site.model, path.parent)]
    one, other = (load_without_tower(folder, torch.float32) for folder in folders)
    ids = torch.arange(5, 40)[None]
    assert torch.equal(one(input_ids=ids).logits, other(input_ids=ids).logits)
    assert other.config.text_config.rope_parameters.items() >= sections.items()
    towers = [Tower(folder, torch.float32) for folder in folders]
    patches = torch.randn(4 * 6, 3 * 2 * 14 * 14)
    assert torch.equal(*(tower.encode(patches, [(1, 4, 6)]) for tower in towers))


def split(tensors: Tensors, part: str) -> tuple[Tensors, Tensors]:
    """The tensors with `part` in their name, and the others."""
    chosen = {name: tensor for name, tensor in tensors.items() if part in name}
    return chosen, {name: tensor for name, tensor in tensors.items() if name not in chosen}


def assert_refused(folder: ModelFolder, message: str) -> None:
    for load in (load_without_tower, load_with_tower):
        with pytest.raises(ModelError, match=message):
            load(folder, torch.float32)


@TENSOR_IS_NAMED
@pytest.mark.parametrize("names", [new_names, published])
@pytest.mark.parametrize("part", [".layers.1.", "embed_tokens.weight"])
def test_missing_tensors_are_counted_and_named(site, tmp_path, names, part):
    missing, others = split(names(load_file(site.model / "model.safetensors")), part)
    broken, number = sharded(site.model, tmp_path / "model", others), f"{len(in_model(missing))} tensors?"
    assert missing
    assert_refused(broken, rf"has no values for {number} of the model: \S*{part}")


@TENSOR_IS_NAMED
@pytest.mark.parametrize("names", [new_names, published])
def test_tensors_of_other_shapes_are_counted_and_named(site, tmp_path, names):
    """All those of a layer, norms and experts too."""
    chosen, others = split(names(load_file(site.model / "model.safetensors")), ".layers.1.")
    smaller = {name: tensor[: len(tensor) // 2].clone() for name, tensor in chosen.items()}
    broken = sharded(site.model, tmp_path / "model", others | smaller)
    assert_refused(broken, rf"has other shapes for {len(in_model(smaller))} tensors .*\.layers\.1\.\S+ \[32\]")


@TENSOR_IS_NAMED
@pytest.mark.parametrize("site", [FAMILIES["qwen3_5_moe"]], ids=["moe"], indirect=True)
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_a_tensor_that_one_expert_lacks_is_named(site, tmp_path, part):
    _, others = split(load_file(site.model / "model.safetensors"), f"layers.1.mlp.experts.3.{part}.weight")
    broken = sharded(site.model, tmp_path / "model", others)
    name = rf"\S*layers\.1\.mlp\.experts\.3\.{part}\.weight"
    assert_refused(broken, f"has no values for 1 tensor of the model: {name}; download")


EXPERTS = [FAMILIES["qwen3_5_moe"], FAMILIES["qwen3_vl_moe"]]


@TENSOR_IS_NAMED
@pytest.mark.parametrize("site", EXPERTS, ids=["3.5", "3"], indirect=True)
@pytest.mark.parametrize("shape", [(-1,), ()], ids=["flat", "scalar"])
def test_one_misshapen_tensor_of_experts_is_named(site, tmp_path, shape):
    tensors = load_file(site.model / "model.safetensors")
    for layer in (1, 2):  # one of those that are joined, and one that is not
        part = "up_proj" if layer == 1 else "down_proj"
        name = max(name for name in tensors if f"layers.{layer}.mlp.experts." in name and part in name)
        few = tensors[name].flatten()[: None if -1 in shape else 1]
        broken = sharded(site.model, tmp_path / str(layer), tensors | {name: few.reshape(shape).clone()})
        with pytest.raises(ModelError, match=rf"has other shapes for 1 tensor of the model: {re.escape(name)} \["):
            load_without_tower(broken, torch.float32)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-100])])
def test_a_missing_or_short_file_of_weights_is_named(site, tmp_path, damage):
    broken = sharded(site.model, tmp_path / "model", load_file(site.model / "model.safetensors"))
    damage(broken.folder / "model-1.safetensors")
    with pytest.raises(ModelError, match=r"cannot read \S*model-1\.safetensors: .*; copy or download it again"):
        load_without_tower(broken, torch.float32)


def test_a_missing_tensor_of_the_tower_is_named(site, tmp_path):
    _, tensors = split(load_file(site.model / "model.safetensors"), "blocks.2.attn.qkv.weight")
    with pytest.raises(ModelError, match=r"does not fit its configuration: .* example blocks\.2\.attn\.qkv\.weight"):
        Tower(sharded(site.model, tmp_path / "model", tensors), torch.float32)


def test_the_hash_of_the_language_model_depends_on_all_but_the_tower(site, tmp_path):
    """It needs the name of the tower."""
    tensors, hashes = load_file(site.model / "model.safetensors"), []
    for part in ("lm_head.weight", "blocks.2.attn.qkv.weight", "no tensor"):
        chosen, others = split(tensors, part)
        sharded(site.model, tmp_path / part, others | {name: tensor + 1 for name, tensor in chosen.items()})
        hashes.append(hash_language_model(tmp_path / part))
    assert hashes[1] == hashes[2] != hashes[0]


@pytest.mark.parametrize("targets", [LoraSection().targets, "all-linear", ["q_proj", "down_proj"]])
def test_lora_is_on_the_language_model_alone_and_the_stock_model_agrees(site, targets):
    model_folder = ModelFolder.open(str(site.model))
    names = []
    for load in (load_without_tower, load_with_tower):
        model = add_lora(load(model_folder, torch.float32), model_folder, LoraSection(targets=targets), seed=0)
        names.append({name for name, _ in model.named_parameters() if "lora_" in name})
        if load is load_without_tower:
            targets = model.peft_config["default"].target_modules  # as the adapter's file has them
            targets = targets if isinstance(targets, str) else sorted(targets)
    assert names[0] == names[1] and names[0]
    assert all(".language_model.layers." in name for name in names[0])
