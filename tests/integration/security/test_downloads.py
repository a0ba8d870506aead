"""A file that has the size and not the content that the Hub states is refused, wherever it was changed.

huggingface_hub compares sizes only: without the comparison of hashes each of these downloads would be used. A file that
the Hub does not have is refused too.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.errors import ModelError, SourceError
from lookonce.fetch import fetch
from lookonce.hub import ADAPTER_FILES, download_dataset, download_model, find_adapter

pytestmark = pytest.mark.guarantee(
    "A download that differs from what the Hub states is refused, whether it was changed on its way or on the "
    "disk, and so is a file that was added to the download."
)

NAME = "owner/model"
FIRST = "1" * 39 + "a"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
HASHES = {
    WEIGHTS: lambda content: hashlib.sha256(content).hexdigest(),
    CONFIG: lambda content: hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
}


@pytest.fixture
def hub(sample: Path, make_hub: Callable[..., Any]) -> Any:
    return make_hub(NAME, "models", {path.name: path.read_bytes() for path in (sample / "model").iterdir()}, [])


def changed(content: bytes) -> bytes:
    """The same number of bytes, of which the last one that is not a space has another bit."""
    end = len(content.rstrip())
    return content[: end - 1] + bytes([content[end - 1] ^ 1]) + content[end:]


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("get", [download_model, ModelFolder.open], ids=["fetch", "train"])
def test_a_file_of_a_model_that_was_changed_on_the_way_is_refused(hub, name, get):
    sent = hub.on_the_way[name] = changed(hub.files[name])
    with pytest.raises(ModelError) as caught:
        get(NAME, FIRST)
    message = str(caught.value)
    assert f"model '{NAME}' differs from what the Hub states at commit {FIRST}: {name} (" in message
    assert HASHES[name](sent) in message and f"the Hub states {HASHES[name](hub.files[name])}" in message
    assert message.endswith(" && lookonce fetch RUN.yaml")


def test_the_command_of_the_message_mends_the_download(hub, make_run):
    run = make_run(model={"path": NAME, "revision": FIRST})
    hub.on_the_way = {name: changed(hub.files[name]) for name in (WEIGHTS, CONFIG)}
    with pytest.raises(ModelError) as caught:
        fetch(run)
    [command] = re.findall(r": (rm .*) && lookonce fetch RUN\.yaml$", str(caught.value))
    assert len(shlex.split(command)) == 3
    hub.on_the_way.clear()
    subprocess.run(shlex.split(command), check=True)
    report = fetch(run)
    assert report.is_verified and (report.folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_file_that_was_changed_on_the_disk_after_it_was_verified_is_refused(hub, make_run):
    run = make_run(model={"path": NAME, "revision": FIRST})
    path = fetch(run).folder / WEIGHTS
    before = path.stat()
    path.write_bytes(changed(hub.files[WEIGHTS]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a program that hides the change would
    with pytest.raises(ModelError, match=rf"{WEIGHTS} \(sha256"):
        fetch(run)


def test_what_another_program_downloaded_is_verified_as_soon_as_the_hub_can_be_asked(hub, make_run, monkeypatch):
    folder = Path(snapshot_download(NAME, revision=FIRST))
    (folder / CONFIG).write_bytes(hub.files[CONFIG] + b" ")
    run = make_run(model={"path": NAME, "revision": FIRST})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    report = fetch(run)
    assert report.is_verified is False and "contents not verified, because the Hub cannot be reached (" in report.text()
    assert "offline mode" in report.refusal.lower()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match=rf"{CONFIG} \(git-sha1"):
        fetch(run)


def test_a_dataset_that_was_changed_on_the_way_is_refused(make_hub):
    hub = make_hub("owner/data", "datasets", {"data/train.parquet": b"rows", "README.md": b"card"}, [])
    hub.on_the_way["data/train.parquet"] = b"sowr"
    with pytest.raises(SourceError, match=r"dataset 'owner/data' differs .*data/train.parquet \(sha256") as found:
        download_dataset("owner/data", FIRST, ["*.parquet"])
    assert str(found.value).endswith(" && lookonce data prepare DATASET DIR")


INDEX = "model.safetensors.index.json"


def test_an_index_that_was_added_is_refused_and_the_command_of_the_message_mends_it(hub, make_run):
    run = make_run(model={"path": NAME, "revision": FIRST})
    folder = fetch(run).folder
    (folder / ".notes").write_text("mine")
    assert fetch(run).is_verified
    (folder / "other weights.safetensors").write_bytes(hub.files[WEIGHTS])
    (folder / INDEX).write_text('{"weight_map": {"lm_head.weight": "other weights.safetensors"}}')
    for get in (lambda: fetch(run), lambda: ModelFolder.open(NAME, FIRST)):
        with pytest.raises(ModelError) as caught:
            get()
        unlisted = "(which the Hub does not list)"
        assert f"{FIRST}: {INDEX} {unlisted}, other weights.safetensors {unlisted}\n" in str(caught.value)
    [command] = re.findall(r": (rm .*) && lookonce fetch RUN\.yaml$", str(caught.value))
    subprocess.run(shlex.split(command), check=True)
    assert fetch(run).is_verified and (folder / ".notes").exists()


def test_weights_of_an_adapter_that_were_added_are_refused(make_hub):
    make_hub("owner/adapter", "models", {name: name.encode() for name in ADAPTER_FILES}, [])
    (find_adapter("owner/adapter", FIRST) / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match="adapter 'owner/adapter' differs .*adapter_model.bin .which"):
        find_adapter("owner/adapter", FIRST)
