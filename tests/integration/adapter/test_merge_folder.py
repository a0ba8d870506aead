"""A merged folder appears whole or not at all, has the bytes of all that the adapter leaves as it is."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.answers import look_trained
from transformers import AutoModelForImageTextToText

from lookonce.adapter import merge as module
from lookonce.adapter.merge import Merged, merge
from lookonce.adapter.weights import BLOCK_VALUES
from lookonce.cache.store.fingerprint import hash_language_model
from lookonce.datasets.sample.model import write_model
from lookonce.errors import RunFolderError, UsageError
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import Needs, open_run

NUM_FILES = 5
TARGETS = ["q_proj", "down_proj"]
OTHERS = {
    "README.md": b"# A model\n",
    "LICENSE": b"Apache\r\n",
    "code/tower.py": b"x = 1\n",
    "merges.txt": b"\xff\x00a b\n",
}
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


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("model-*.safetensors") for name, one in load_file(path).items()}


def is_target(name: str) -> bool:
    return ".language_model." in name and any(target in name for target in TARGETS)


@pytest.mark.guarantee("What an adapter does not change keeps its bytes in the merged model.")
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
    model = AutoModelForImageTextToText.from_pretrained(made / "model", dtype=torch.float32)
    expected = PeftModel.from_pretrained(model, str(made / "run" / "adapter")).merge_and_unload().state_dict()
    found = tensors_of(tmp_path / "merged")
    change = rounding = 0.0
    for name, before in tensors_of(made / "model").items():
        assert torch.equal(found[name], expected[name].bfloat16())
        change += (expected[name] - before.float()).square().sum().item()
        rounding += (expected[name] - found[name].float()).square().sum().item()
    assert merged.rounding == pytest.approx((rounding / change) ** 0.5, rel=1e-3) and rounding > 0


def test_fp32_rounds_nothing_and_the_configuration_and_index_say_so(made, tmp_path):
    merged = merge_in(made, tmp_path / "merged", dtype="fp32")
    model = AutoModelForImageTextToText.from_pretrained(made / "model", dtype=torch.float32)
    expected = PeftModel.from_pretrained(model, str(made / "run" / "adapter")).merge_and_unload().state_dict()
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


def test_a_merge_that_is_stopped_leaves_nothing(made, tmp_path, monkeypatch):
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "copy_other_files", stopped)
    with pytest.raises(KeyboardInterrupt):
        merge_in(made, tmp_path / "merged")
    assert [*tmp_path.iterdir()] == []


def test_a_target_that_appears_meanwhile_is_left_alone(made, tmp_path, monkeypatch):
    def slow(*arguments: Any) -> None:
        (tmp_path / "merged").mkdir()

    monkeypatch.setattr(module, "copy_other_files", slow)
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
