"""In each family and each layout of a checkpoint, the merged model has the logits of PEFT's on the stock model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.answers import look_trained
from transformers import AutoModelForImageTextToText

from lookonce.adapter.merge import Merged, merge
from lookonce.adapter.weights import plan_merge
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.store.fingerprint import hash_language_model
from lookonce.datasets.sample.model import write_model
from lookonce.errors import ModelError
from lookonce.families.family import Family
from lookonce.families.lookup import FAMILIES
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import Needs, OpenRun, open_run
from lookonce.train.model.load import add_lora, load_without_tower

pytestmark = [  # of PEFT, as it saves and loads such adapters
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:.*[Tt]ied"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings"),
]
Tensors = dict[str, torch.Tensor]
PARTS = ("gate", "up", "down")
IDS = torch.arange(5, 40)[None]
EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)\.weight$")


@dataclass(frozen=True)
class Site:
    """Where a test has its models and runs."""

    folder: Path
    make_run_in: Callable[..., RunFile]
    models: Path
    """Holds a model of each family. Tests must not write to it."""

    def copy(self, family: Family) -> Path:
        return Path(shutil.copytree(self.models / family.model_type, self.folder / "model"))

    def trained(self, model: Path, **lora: Any) -> Path:
        """The folder of a run whose adapter, on this model, has random values."""
        run = self.make_run_in(self.folder, model={"path": str(model)}, lora=lora)
        folder, inputs = RunFolder(run.output), open_run(run, Needs("tests", model="open"))
        identity = {"language_model": hash_language_model(model), "cache": inputs.fingerprint.sha256}
        folder.claim(run, identity)
        random_adapter(inputs).save_pretrained(str(folder.adapter))
        look_trained(folder)
        return folder.folder

    def merge(self, run: Path, name: str = "merged", **options: Any) -> Merged:
        return merge(run, self.folder / name, **{"dtype": "fp32"} | options)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES.values():
        write_model(folder / family.model_type, family=family)
    return folder


@pytest.fixture
def site(tmp_path: Path, make_run_in: Callable[..., RunFile], models: Path) -> Site:
    return Site(tmp_path, make_run_in, models)


def random_adapter(inputs: OpenRun) -> Any:
    model = add_lora(load_without_tower(inputs.model_folder, torch.float32), inputs.model_folder, inputs.run.lora, 1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data += torch.empty_like(parameter).normal_(0, 0.03, generator=generator)
    return model


def stock(folder: Path, adapter: Path | None = None) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return (PeftModel.from_pretrained(model, str(adapter)) if adapter else model).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def assert_same_logits(model: Path, run: Path, merged: Path) -> None:
    """And others than those of the untuned model."""
    before, expected, found = (logits(stock(*one)) for one in ((model,), (model, run / "adapter"), (merged,)))
    scale = expected.abs().max()
    assert (found - expected).abs().max() <= 1e-5 * scale
    assert (before - expected).abs().max() > 1e-2 * scale


def all_tensors(folder: Path) -> Tensors:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def set_in_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= values
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.guarantee(
    "A merged model has the logits that PEFT gives on the stock model, to 1e-5 in float32, in each family and "
    "layout of experts."
)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_the_merged_model_has_the_logits_of_peft(site, family):
    model = site.copy(family)
    lora: dict[str, Any] = {"targets": "all-linear", "rslora": True}
    run = site.trained(model, **lora, experts=bool(family.experts))
    merged = site.merge(run)
    assert_same_logits(model, run, merged.folder)
    assert all_tensors(merged.folder).keys() == all_tensors(model).keys() and merged.rounding == 0


def transposed(tensors: Tensors) -> Tensors:
    """All experts in one tensor, whose matrices are transposed: the published files of Qwen3-VL's."""
    return {name: tensor.transpose(1, 2) if ".experts." in name else tensor for name, tensor in tensors.items()}


def joined(tensors: Tensors) -> Tensors:
    """All experts in one tensor, from one each."""
    found = {name: tensor for name, tensor in tensors.items() if not EXPERT.search(name)}
    layers = {name[: match.start()] for name in tensors if (match := EXPERT.search(name))}
    for layer in layers:
        num = 1 + max(int(EXPERT.search(name)[1]) for name in tensors if name.startswith(f"{layer}.experts."))
        one = [[tensors[f"{layer}.experts.{number}.{part}_proj.weight"] for number in range(num)] for part in PARTS]
        gates = [torch.cat(pair) for pair in zip(*one[:2], strict=True)]
        found |= {
            f"{layer}.experts.gate_up_proj": torch.stack(gates),
            f"{layer}.experts.down_proj": torch.stack(one[2]),
        }
    return found


@pytest.mark.guarantee(
    "A merged model has the logits that PEFT gives on the stock model, to 1e-5 in float32, in each family and "
    "layout of experts."
)
@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3_vl_moe", transposed), ("qwen3_5_moe", joined)], ids=["transposed", "joined"]
)
def test_experts_in_another_layout_are_merged_in_it(site, name, layout):
    model = site.copy(FAMILIES[name])
    tensors = layout(load_file(model / "model.safetensors"))
    save_file({name: one.contiguous() for name, one in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    run = site.trained(model, experts=True)
    merged = site.merge(run)
    assert_same_logits(model, run, merged.folder)
    shapes = [{name: one.shape for name, one in all_tensors(folder).items()} for folder in (model, merged.folder)]
    assert shapes[0] == shapes[1]


def test_published_names_are_kept(site):
    model = site.copy(FAMILIES["qwen2_5_vl"])
    tensors = load_file(model / "model.safetensors")
    assert not any("language_model" in name for name in tensors)
    newer = {re.sub(r"^model\.", "model.language_model.", name): one for name, one in tensors.items()}
    newer = {re.sub(r"^visual\.", "model.visual.", name): one for name, one in newer.items()}
    save_file(newer, model / "model.safetensors", {"format": "pt"})
    run = site.trained(model)
    merged = site.merge(run)
    assert_same_logits(model, run, merged.folder)
    assert all_tensors(merged.folder).keys() == newer.keys()


@pytest.mark.parametrize("lora", [{"modules_to_save": ["embed_tokens"]}, {"targets": ["q_proj", "lm_head"]}], ids=str)
@pytest.mark.parametrize("has_both", [False, True])
def test_tied_embeddings_are_untied_if_one_of_them_was_trained(site, lora, has_both):
    model = site.copy(FAMILIES["qwen3_vl"])
    tensors = load_file(model / "model.safetensors")
    embeddings = tensors["model.language_model.embed_tokens.weight"]
    del tensors["lm_head.weight"]
    save_file(tensors | ({"lm_head.weight": embeddings.clone()} if has_both else {}), model / "model.safetensors")
    set_in_config(model, tie_word_embeddings=True)
    run = site.trained(model, **lora)
    merged = site.merge(run)
    assert merged.is_untied
    assert_same_logits(model, run, merged.folder)
    found = stock(merged.folder)
    assert not torch.equal(found.lm_head.weight, found.model.language_model.embed_tokens.weight)
    assert not found.config.tie_word_embeddings and not found.config.text_config.tie_word_embeddings


def test_tied_embeddings_stay_tied_if_none_was_trained(site):
    model = site.copy(FAMILIES["qwen3_vl"])
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors")
    set_in_config(model, tie_word_embeddings=True)
    run = site.trained(model)
    merged = site.merge(run, dtype="bf16")
    assert not merged.is_untied and "lm_head.weight" not in all_tensors(merged.folder)
    assert (merged.folder / "config.json").read_bytes() == (model / "config.json").read_bytes()


@pytest.mark.parametrize(
    "lora",
    [
        {"targets": ["embed_tokens", "v_proj"]},
        {"modules_to_save": ["embed_tokens", "lm_head", "norm", "k_proj"], "targets": ["v_proj"]},
        {"targets": r".*layers\.[13]\.mlp\.(up|down)_proj"},
    ],
    ids=["embedding", "modules", "pattern"],
)
def test_embeddings_whole_modules_and_patterns_are_merged(site, lora):
    model = site.copy(FAMILIES["qwen2_vl"])
    run = site.trained(model, **lora)
    assert_same_logits(model, run, site.merge(run).folder)


def test_an_adapter_with_tensors_of_another_kind_is_refused(site):
    model = site.copy(FAMILIES["qwen3_vl"])
    run = site.trained(model)
    path = run / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    extra = next(iter(tensors)).replace("lora_A.weight", "lora_magnitude_vector")
    save_file(tensors | {extra: torch.ones(3)}, path)
    look_trained(RunFolder(run))
    with pytest.raises(ModelError, match=r"has tensors that cannot be merged: \S*lora_magnitude_vector"):
        site.merge(run)
    assert not (site.folder / "merged").exists()


def test_quantised_weights_are_refused_with_the_ways(site):
    model = site.copy(FAMILIES["qwen3_vl"])
    run, path = site.trained(model), model / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "language_model" in name and "q_proj" in name)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} is quantised \(I8\).* train\.frozen: int8 or nf4"):
        plan_merge(ModelFolder.open(str(model)).config, [path], run / "adapter", torch.float32)
