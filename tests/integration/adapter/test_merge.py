"""In each family and layout the merged model has the logits of PEFT's on the stock one; a merge is whole or absent."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.answers import look_trained
from transformers import AutoModelForImageTextToText

from lookonce.adapter.merge import Merged, merge
from lookonce.adapter.weights import BLOCK_VALUES, plan_merge
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.store.fingerprint import hash_language_model
from lookonce.datasets.sample.model import write_model
from lookonce.errors import ModelError, RunFolderError, UsageError
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


def all_tensors(folder: Path, pattern: str = "*.safetensors") -> Tensors:
    return {name: tensor for path in folder.glob(pattern) for name, tensor in load_file(path).items()}


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


# A merged folder appears whole or not at all, with the bytes of all that the adapter leaves as it is.

NUM_FILES = 5
TARGETS = ["q_proj", "down_proj"]
OTHERS = {"README.md": b"# A model\n", "LICENSE": b"A\r\n", "code/tower.py": b"x = 1\n", "merges.txt": b"\xff\x00a b\n"}
FOREIGN = [
    "pytorch_model.bin",
    "original/consolidated.00.pth",
    "consolidated.safetensors",
    "pytorch_model.bin.index.json",
]
STOPPED_AFTER = 2
KILLED = """
import os, signal, sys
import lookonce.adapter.merge as whole
from pathlib import Path

written = 0
write_file = whole.write_file

def killed(source, target, planned, cost, progress):
    global written
    def dying(num_bytes):
        progress(num_bytes)
        if written == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
    write_file(source, target, planned, cost, dying)
    written += 1

whole.write_file = killed
whole.merge(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_run_in: Callable[..., RunFile], random_lora: Any) -> Path:
    """A folder with a sharded bfloat16 model that has other files too, and a run on it. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("made")
    write_model(folder / "one")
    shutil.copytree(folder / "one", folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {name: one.bfloat16() for name, one in load_file(folder / "one" / "model.safetensors").items()}
    files = {name: f"model-{number % NUM_FILES}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / "model" / file)
    index = {"metadata": {"total_size": sum(one.nbytes for one in tensors.values())}, "weight_map": files}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    config = json.loads((folder / "model" / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "model" / "config.json").write_text(json.dumps(config, indent=3))
    for name in (*OTHERS, *FOREIGN):
        path = folder / "model" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(OTHERS.get(name, b"weights"))
    save_file({"weight": torch.ones(2)}, folder / "model" / "consolidated.safetensors")
    run = make_run_in(folder, model={"path": str(folder / "model")}, lora={"targets": TARGETS, "rank": 8, "alpha": 8})
    inputs, trained = open_run(run, Needs("tests", model="open")), RunFolder(run.output)
    trained.claim(run, {"language_model": hash_language_model(folder / "model"), "cache": inputs.fingerprint.sha256})
    random_lora(inputs).save_pretrained(str(trained.adapter))
    look_trained(trained)
    return folder


def merge_in(made: Path, target: Path, **options: Any) -> Merged:
    return merge(made / "run", target, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors_of(folder: Path) -> Tensors:
    return all_tensors(folder, "model-*.safetensors")


def merged_by_peft(made: Path) -> Tensors:
    return stock(made / "model", made / "run" / "adapter").merge_and_unload().state_dict()


def is_target(name: str) -> bool:
    return ".language_model." in name and any(target in name for target in TARGETS)


@pytest.mark.guarantee("Tensors that an adapter does not change keep their bytes in the merged model.")
def test_only_what_the_adapter_changes_has_other_bytes(made, tmp_path):
    merged = merge_in(made, tmp_path / "merged")
    before, after = contents(made / "model"), contents(tmp_path / "merged")
    assert after.keys() == before.keys() - {*FOREIGN} | {"lookonce-merge.json"}
    assert sorted(merged.left_out) == sorted(FOREIGN)
    weights = {name for name in before if name.startswith("model-")}
    assert all(after[name] == before[name] for name in after.keys() - weights - {"lookonce-merge.json"})
    old, new = tensors_of(made / "model"), tensors_of(tmp_path / "merged")
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {name for name in old if is_target(name)} and len(changed) == merged.num_changed
    assert {one.dtype for one in new.values()} == {torch.bfloat16}
    for file in weights:
        with safe_open(tmp_path / "merged" / file, "pt") as one, safe_open(made / "model" / file, "pt") as other:
            assert one.keys() == other.keys() and one.metadata() == other.metadata()


def test_a_changed_tensor_is_the_sum_in_float32_rounded_once(made, tmp_path):
    merged = merge_in(made, tmp_path / "merged")
    expected = merged_by_peft(made)
    found = tensors_of(tmp_path / "merged")
    change = rounding = 0.0
    for name, before in tensors_of(made / "model").items():
        assert torch.equal(found[name], expected[name].bfloat16())
        change += (expected[name] - before.float()).square().sum().item()
        rounding += (expected[name] - found[name].float()).square().sum().item()
    assert merged.rounding == pytest.approx((rounding / change) ** 0.5, rel=1e-3) and rounding > 0


def test_fp32_rounds_nothing_and_the_configuration_and_index_say_so(made, tmp_path):
    merged = merge_in(made, tmp_path / "merged", dtype="fp32")
    expected = merged_by_peft(made)
    found = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert found.dtype == torch.float32 and merged.rounding == 0
    assert all(torch.allclose(expected[name], one, rtol=1e-6, atol=1e-6) for name, one in found.state_dict().items())
    old, new = tensors_of(made / "model"), tensors_of(tmp_path / "merged")
    assert all(new[name].dtype == (torch.float32 if is_target(name) else torch.bfloat16) for name in old)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in new.values()) == merged.size_bytes
    assert (
        index["weight_map"] == json.loads((made / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    )


@pytest.mark.guarantee(
    "A merge that is killed leaves no folder of that name, and the next one removes what it has left."
)
def test_a_merge_that_is_killed_begins_again(made, tmp_path, preloaded):
    place = tmp_path / "place"
    place.mkdir()
    killed = preloaded.start(KILLED, str(made / "run"), str(place / "merged"), str(STOPPED_AFTER), folder=tmp_path)
    assert killed.wait() == -signal.SIGKILL, killed.error
    [left] = place.iterdir()
    assert left.name.startswith("lookonce-merge") and len([*left.rglob("model-?.safetensors")]) == STOPPED_AFTER
    merge_in(made, place / "merged")
    assert [path.name for path in place.iterdir()] == ["merged"]
    merge_in(made, tmp_path / "at-once")
    assert contents(place / "merged") == contents(tmp_path / "at-once")


def test_a_merge_that_is_stopped_leaves_nothing_and_a_target_that_appears_meanwhile_is_left_alone(
    made, tmp_path, monkeypatch
):
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lookonce.adapter.merge.copy_other_files", stopped)
    with pytest.raises(KeyboardInterrupt):
        merge_in(made, tmp_path / "merged")
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr("lookonce.adapter.merge.copy_other_files", lambda *_: (tmp_path / "merged").mkdir())
    with pytest.raises(UsageError, match="choose another DIR"):
        merge_in(made, tmp_path / "merged")
    assert [*tmp_path.iterdir()] == [tmp_path / "merged"] and not [*(tmp_path / "merged").iterdir()]


@pytest.mark.guarantee("A merge never writes to an existing folder.")
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_exists_is_never_written_to(made, tmp_path, kind):
    target = tmp_path / "there"
    {"folder": target.mkdir, "file": target.touch, "link": lambda: target.symlink_to("nowhere")}[kind]()
    with pytest.raises(UsageError, match="exists"):
        merge_in(made, target)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_target_in_the_models_own_folder_is_refused(made):
    before = contents(made / "model")
    with pytest.raises(UsageError, match="is in the folder of the model"):
        merge_in(made, made / "model" / "merged")
    assert contents(made / "model") == before


def test_a_model_that_has_changed_since_training_is_refused(made, tmp_path):
    shutil.copytree(made, tmp_path / "copy")
    record = tmp_path / "copy" / "run" / "run.json"
    record.write_text(record.read_text().replace(str(made), str(tmp_path / "copy")))
    (tmp_path / "copy" / "model" / "config.json").write_text(
        (made / "model" / "config.json").read_text().replace('"dtype"', '"torch_dtype"')
    )
    with pytest.raises(RunFolderError, match="have changed since training"):
        merge_in(tmp_path / "copy", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


NUM_ROWS, NUM_COLUMNS = 20_480, 2_048
MAX_GROWTH = 60_000_000
"""Less than the tensor's 84 MB in bfloat16, and its 168 MB in float32."""
MERGE = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import torch
from lookonce.adapter.weights import Change, Cost, Planned, Stored, _header, write_file

folder, step = Path(sys.argv[1]), int(sys.argv[4])

def merge(name, rows, columns):
    num_bytes = 2 * rows * columns
    tensors = [Stored(one, "BF16", (rows, columns), num_bytes) for one in ("changed", "copied")]
    header = _header(tensors, {})
    with (folder / name).open("wb") as file:  # zeros that take no place on the disk
        file.write(header)
        file.truncate(len(header) + 2 * num_bytes)
    changed, copied = (replace(one, offset=len(header) + start) for one, start in zip(tensors, (0, num_bytes)))
    change = Change(torch.ones(1, rows, 8), torch.ones(1, 8, columns), 0.5)
    planned = [Planned(tensors[0], changed, change), Planned(tensors[1], copied)]
    cost = Cost()
    write_file(folder / name, folder / f"{name}-merged", planned, cost, lambda _: None)
    assert cost.change == 16.0 * rows * columns, cost
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = merge("small", 2 * step // int(sys.argv[3]), int(sys.argv[3]))
print(merge("large", int(sys.argv[2]), int(sys.argv[3])) - before)
"""


@pytest.mark.guarantee("Merging takes a few blocks of memory, whatever the size of a tensor.")
def test_the_memory_does_not_grow_with_the_tensor(tmp_path: Path, preloaded: Any) -> None:
    arguments = [str(tmp_path), str(NUM_ROWS), str(NUM_COLUMNS), str(BLOCK_VALUES)]
    done = preloaded.start(MERGE, *arguments, folder=tmp_path)
    assert done.wait() == 0, done.error
    growth = int(done.out)
    assert growth < MAX_GROWTH, f"{growth:,} bytes"
