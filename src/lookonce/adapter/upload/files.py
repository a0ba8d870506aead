"""The files of an upload: an adapter with the record of its run, or a merged model.

Design: what is uploaded is named here, one file a line; nothing else of a run folder ever is. Predictions, records,
images, logs and checkpoints are not. Files that name folders are rewritten in memory, so the run folder stays as it is.
An adapter has the record of its run (run.json, trained.json), with which a training can start from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from lookonce.adapter.upload.base_model import BaseModel
from lookonce.adapter.upload.facts import CardFacts
from lookonce.adapter.upload.local_paths import check_files, reduced_run, without_folders
from lookonce.errors import UsageError
from lookonce.files import hash_file, read_json, read_object
from lookonce.hub import CARD
from lookonce.run.folder import RECORD, RunFolder
from lookonce.text import shell

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
RUN_FILE = "run.yaml"
MERGED = "lookonce-merge.json"
"""The file of a merged model that says what it was made from."""
OF_MODEL = ("*.json", "*.jinja", "*.txt", "LICENSE*", "NOTICE*")
"""The files of a merged model beside its weights."""
VERBATIM = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
"""Files whose texts are tokens, of which some look like paths."""
MAX_JSON_BYTES = 1 << 28


@dataclass(frozen=True)
class UploadFile:
    """One file of an upload."""

    name: str
    """Its path in the repository."""
    content: Path | bytes

    @property
    def size_bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


def adapter_files(folder: RunFolder, facts: CardFacts, card: str) -> list[UploadFile]:
    """The files of an adapter.

    Raises:
        UsageError: one of them names a folder of this machine.
    """
    config = read_object(folder.adapter / CONFIG) | {
        "base_model_name_or_path": facts.base.name,
        "revision": facts.base.commit,
    }
    shape = _json(CONFIG, without_folders(config))
    assert isinstance(shape.content, bytes)
    hashes = {**facts.trained["adapter"], CONFIG: xxhash.xxh3_128_hexdigest(shape.content)}
    facts = replace(facts, trained={**facts.trained, "adapter": hashes})
    files = [UploadFile(WEIGHTS, folder.adapter / WEIGHTS), shape]
    return _checked(folder, [*files, *_record(folder, facts), _text(CARD, card)])


def merged_files(folder: RunFolder, merged: Path, facts: CardFacts, card: str) -> list[UploadFile]:
    """The files of a merged model.

    Raises:
        UsageError: the folder holds no complete model, or one that was merged from another adapter.
    """
    _check_merged(folder, merged)
    weights = [UploadFile(path.name, path) for path in sorted(merged.glob("*.safetensors"))]
    others = sorted({path for pattern in OF_MODEL for path in merged.glob(pattern) if path.is_file()})
    files = [_reduced(path, facts.base) for path in others]
    run = [one for one in _record(folder, facts) if one.name == RUN_FILE or one.name.startswith("metrics/")]
    return _checked(folder, [*weights, *files, *run, _text(CARD, card)], merged)


def _check_merged(folder: RunFolder, merged: Path) -> None:
    names = ["config.json", "tokenizer_config.json"]
    index = read_object(merged / "model.safetensors.index.json")
    names += sorted(set(index["weight_map"].values())) if "weight_map" in index else ["model.safetensors"]
    if absent := [name for name in names if not (merged / name).is_file()]:
        raise UsageError(
            f"{merged} is not a complete merged model, it lacks {absent[0]}; "
            f"make one with: {shell('lookonce', 'adapter', 'merge', folder.folder, 'DIR')}"
        )
    made_from = read_object(merged / MERGED).get("made_from", {})
    if made_from.get("adapter", (mine := hash_file(folder.adapter / WEIGHTS))) != mine:
        raise UsageError(
            f"{merged} was merged from another adapter than that of {folder.folder}; name the run that it was made "
            f"from, or merge this one into a new folder: {shell('lookonce', 'adapter', 'merge', folder.folder, 'DIR')}"
        )


def _record(folder: RunFolder, facts: CardFacts) -> Iterator[UploadFile]:
    """The run file, the record of the run, and the scores."""
    run = reduced_run(facts.run, facts.base)
    yield _text(RUN_FILE, f"# Paths are reduced to their last part.\n{run.to_yaml()}")
    yield _json(RECORD, {"run": run.model_dump(mode="json"), "inputs": folder.recorded_inputs()})
    yield _json(folder.trained.name, dict(facts.trained))
    for split, scores in facts.scores.items():
        yield _json(f"metrics/{split}.json", dict(scores))


def _reduced(path: Path, base: BaseModel) -> UploadFile:
    """A file of a model without folders of this machine; most stay as they are, byte for byte."""
    if path.suffix != ".json" or path.name in VERBATIM or path.name.endswith(".index.json"):
        return UploadFile(path.name, path)
    value = read_json(path, MAX_JSON_BYTES)
    reduced = without_folders(value)
    if isinstance(value, dict) and isinstance(name := value.get("_name_or_path"), str) and Path(name).is_absolute():
        reduced["_name_or_path"] = base.name
    return UploadFile(path.name, path) if reduced == value else _json(path.name, reduced)


def _checked(folder: RunFolder, files: list[UploadFile], *folders: Path) -> list[UploadFile]:
    texts = {one.name: one.content.decode() for one in files if isinstance(one.content, bytes)}
    texts |= {
        one.name: one.content.read_text(encoding="utf-8", errors="replace")
        for one in files
        if isinstance(one.content, Path) and one.content.suffix != ".safetensors" and one.name not in VERBATIM
    }
    check_files(texts, [path.absolute() for path in (folder.folder, *folders, Path.cwd())])
    return files


def _text(name: str, text: str) -> UploadFile:
    return UploadFile(name, text.encode())


def _json(name: str, value: dict[str, Any]) -> UploadFile:
    return _text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
