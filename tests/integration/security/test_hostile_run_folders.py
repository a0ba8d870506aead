"""A run folder from elsewhere: nothing in it is run, followed out of the folder, or read without end."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.errors import LookonceError, RunFolderError, TrainingError
from lookonce.files import hash_file, read_json, write_json
from lookonce.run.config import RunFile
from lookonce.run.folder import CHECKSUMS, STATE, RunFolder
from lookonce.train.loop.checkpoints import damaged_files
from lookonce.train.model.load import load_trained
from lookonce.workflow import train

pytestmark = pytest.mark.guarantee(
    "A damaged or hostile file is read, or refused with an error message, in bounded time and memory."
)

QUIET = {"notify": lambda note: None}
PICKLES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def unfinished(make_cached_run: Any) -> RunFile:
    """A run of four steps that is to be resumed after the second."""
    run: RunFile = make_cached_run(train={"steps": 4, "save_steps": 2}, data={"val": []}, eval={"split": "test"})
    train(run, **QUIET)
    folder = RunFolder(run.output)
    for name in ("trained.json", "summary.json"):
        (folder.folder / name).unlink()
    shutil.rmtree(folder.adapter)
    shutil.rmtree(folder.checkpoints / "checkpoint-4")
    return run


def write_checksums(checkpoint: Path) -> None:
    """Checksums that fit: whoever writes a checkpoint can write them too."""
    names = [path.name for path in checkpoint.iterdir() if path.name != CHECKSUMS]
    write_json(checkpoint / CHECKSUMS, {name: hash_file(checkpoint / name) for name in names})


@pytest.mark.guarantee("Unpickling a file gives numbers only and runs no code.")
def test_nothing_in_a_checkpoint_is_unpickled_that_is_not_a_number(unfinished, tmp_path):
    checkpoint, harm = RunFolder(unfinished.output).checkpoints / "checkpoint-2", tmp_path / "harm"
    for name in PICKLES:
        kept = (checkpoint / name).read_bytes()
        for save in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))):
            save({"state": Harmful(harm)}, checkpoint / name)
            write_checksums(checkpoint)
            with pytest.raises(TrainingError, match="holds other objects.*none of them was loaded.*--restart") as error:
                train(unfinished, resume=True, **QUIET)
            assert not harm.exists() and str(checkpoint) in str(error.value)
        (checkpoint / name).write_bytes(kept)
    write_checksums(checkpoint)
    assert train(unfinished, resume=True, **QUIET).num_steps == 4
    torch.save(Harmful(harm), tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert harm.exists()  # so it would have been made


def test_a_state_that_trainer_cannot_have_written_is_named_with_its_field(unfinished):
    checkpoint = RunFolder(unfinished.output).checkpoints / "checkpoint-2"
    written = read_json(checkpoint / STATE)
    for change, field in (
        ({"global_step": "2"}, "global_step"),
        ({"log_history": 3}, "log_history"),
        ({"save_steps": {}}, "save_steps"),
        ({"unheard_of": 1}, "unheard_of"),
    ):
        write_json(checkpoint / STATE, written | change)
        write_checksums(checkpoint)
        with pytest.raises(RunFolderError, match=rf"{checkpoint / STATE} is broken: .*{field}.*--restart"):
            train(unfinished, resume=True, **QUIET)


def test_the_list_of_checksums_names_files_of_the_checkpoint_alone(tmp_path):
    """A name such as /dev/zero would be read without end."""
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "secret").write_text("x")
    os.symlink(tmp_path / "secret", tmp_path / "checkpoint-2" / "link")
    os.mkfifo(tmp_path / "checkpoint-2" / "fifo")
    for name in ("/dev/zero", "../secret", "link", "fifo", "a\0b", "", "."):
        write_json(tmp_path / "checkpoint-2" / CHECKSUMS, {name: hash_file(tmp_path / "secret")})
        assert name in damaged_files(tmp_path / "checkpoint-2")
    for content in ("[1]", "3", "[" * 50_000, '{"a": []}'):
        (tmp_path / "checkpoint-2" / CHECKSUMS).write_text(content)
        assert damaged_files(tmp_path / "checkpoint-2")


def test_an_adapter_is_read_from_safetensors_alone_and_imports_no_module(make_cached_run, tmp_path, monkeypatch):
    run = make_cached_run(train={"steps": 1}, data={"val": [], "test": []})
    train(run, **QUIET)
    adapter, model, harm = RunFolder(run.output).adapter, ModelFolder.open(run.model.path), tmp_path / "harm"
    (tmp_path / "harmful_module.py").write_text(f"import os\nos.mkdir({str(harm)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = read_json(adapter / "adapter_config.json")
    write_json(
        adapter / "adapter_config.json", config | {"megatron_config": {"a": 1}, "megatron_core": "harmful_module"}
    )
    load_trained(model, run, adapter)
    assert not harm.exists()
    write_json(adapter / "adapter_config.json", {"peft_type": "IA3"})
    with pytest.raises(RunFolderError, match="an adapter of the type .*IA3; expected LORA"):
        load_trained(model, run, adapter)
    write_json(adapter / "adapter_config.json", config)
    torch.save(load_file(adapter / "adapter_model.safetensors") | {"x": Harmful(harm)}, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(RunFolderError, match="has no adapter_model.safetensors"):
        load_trained(model, run, adapter)
    assert not harm.exists()


BROKEN = ("", "[]", "{}", "[" * 50_000, '{"run": 3, "inputs": 3}', '{"num_steps": []}', "\ud800")


@pytest.mark.parametrize("name", ["run.json", "trained.json"])
def test_broken_records_of_a_run_are_named(make_run, name):
    run = make_run()
    folder = RunFolder(run.output)
    folder.claim(run, {"language_model": "0" * 32})
    for content in BROKEN:
        (folder.folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(RunFolderError, match=f"{name} is broken.*--restart"):
            folder.read_run() if name == "run.json" else folder.read_trained()


@pytest.mark.parametrize("kind", ["device", "fifo", "sparse"])
def test_a_record_that_has_no_end_is_refused_at_once(make_run, kind):
    run = make_run()
    folder = RunFolder(run.output)
    folder.claim(run, {})
    (path := folder.folder / "run.json").unlink()
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(10**13)
    began = time.perf_counter()
    with pytest.raises(LookonceError, match="run.json is broken"):
        folder.read_run()
    assert time.perf_counter() - began < 5


def test_a_run_may_not_put_a_secret_into_a_path(make_run, monkeypatch):
    """A message about the path would show it."""
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    for name in ("$HF_TOKEN", "${HF_TOKEN}/x"):
        with pytest.raises(ValueError, match="HF_TOKEN is a secret") as error:
            make_run(output=f"runs/{name}")
        assert "hf_planted" not in str(error.value)
    folder = RunFolder(make_run().output)
    folder.claim(make_run(), {})
    record = read_json(folder.folder / "run.json")
    (folder.folder / "run.json").write_text(json.dumps(record | {"run": record["run"] | {"output": "/x/$HF_TOKEN"}}))
    with pytest.raises(RunFolderError, match="HF_TOKEN is a secret"):
        folder.read_run()
