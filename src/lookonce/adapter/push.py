"""Upload an adapter or a merged model to the Hugging Face Hub: its files, the commit, and what refuses them.

Design: what is uploaded is named here, one file a line; predictions, records, images, logs and checkpoints never are.
An adapter has the record of its run (run.json, trained.json), with which a training can start from it. No file names a
folder of this machine, since folders have names of people, projects and hosts in them. The paths of a run file are
known by their types, so each becomes its last part. In files of other programs a text is a path if it begins like one.
Files are rewritten in memory. `check_files` then looks for what must not be there, in case a path has another form.

huggingface_hub makes one commit of all files, so a reader never sees half of an upload. A new repository is private
unless the user says otherwise, and a public one is never written to without the user saying so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, LocalTokenNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open

from lookonce.adapter.card import UNKNOWN, BaseModel, CardFacts, card, facts_of, find_base_model
from lookonce.errors import UploadError, UsageError
from lookonce.files import read_json, read_object
from lookonce.hub import CARD, is_hub_name
from lookonce.run.config import RunFile, with_changes
from lookonce.run.folder import RECORD, RunFolder
from lookonce.text import count, first_line, rows, shell, size, table

ABSOLUTE = re.compile(r"(~|/|[A-Za-z]:[\\/])[^\s{}<>|]*[\\/][^\n]*|/[\w.-]+")
"""A text that is an absolute path."""
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")


def reduced_run(run: RunFile, base: BaseModel) -> RunFile:
    """The run with the name of its base model on the Hub, and each path as its last part."""
    return with_changes(run, lambda path: Path(path.name), {"path": base.name, "revision": base.commit})


def without_folders(value: Any) -> Any:
    """JSON in which each text that is an absolute path has become its last part."""
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_folders(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and ABSOLUTE.fullmatch(value) else value


def check_files(texts: Mapping[str, str], folders: Iterable[Path]) -> None:
    """Check that texts name none of these folders, nor the home folder or a token; raises UsageError."""
    private = [str(path) for path in folders if len(path.parts) > 2] + [str(Path.home())]
    patterns = {path: re.compile(rf"(?<![\w.-]){re.escape(path)}(?![\w.-])") for path in private if path != os.sep}
    for name, text in texts.items():
        if folder := next((path for path, pattern in patterns.items() if pattern.search(text)), ""):
            raise UsageError(
                f"{name} names a folder of this machine, {folder}; remove it from that file, then push again"
            )
        if TOKEN.search(text):
            raise UsageError(f"{name} has an access token of the Hub; remove it from that file, then push again")


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
RUN_FILE = "run.yaml"
MERGED = "lookonce-merge.json"
"""The file of a merged model that says what it was made from."""
OF_MODEL = (
    *("config.json", "generation_config.json", "*.safetensors.index.json", "*processor*.json", "*tokenizer*.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*", MERGED),
    *("LICENSE*", "NOTICE*"),
)
"""The files of a merged model beside its weights. Others may have been put there since, such as answers."""
VERBATIM = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
"""Files whose texts are tokens, of which some look like paths."""
MAX_JSON_BYTES = 1 << 28

Files = dict[str, Path | bytes]
"""The files of an upload, by their paths in the repository."""


def adapter_files(folder: RunFolder, facts: CardFacts, card: str) -> Files:
    """The files of an adapter; raises UsageError if one of them names a folder of this machine."""
    base = {"base_model_name_or_path": facts.base.name, "revision": facts.base.commit}
    config = _json(without_folders(read_object(folder.adapter / CONFIG) | base))
    hashes = {**facts.trained["adapter"], CONFIG: xxhash.xxh3_128_hexdigest(config)}
    record = _record(folder, replace(facts, trained={**facts.trained, "adapter": hashes}))
    return _checked(folder, {WEIGHTS: folder.adapter / WEIGHTS, CONFIG: config, **record, CARD: card.encode()})


def merged_files(folder: RunFolder, merged: Path, facts: CardFacts, card: str) -> Files:
    """The files of a merged model; raises UsageError if it is not complete, or of another adapter."""
    index = read_object(merged / "model.safetensors.index.json")
    weights = sorted(set(index.get("weight_map", {"": "model.safetensors"}).values()))
    again = shell("lookonce", "adapter", "merge", folder.folder, "DIR")
    for name in ("config.json", "tokenizer_config.json", *weights):
        if not (merged / name).is_file():
            raise UsageError(f"{merged} is not a complete merged model, it lacks {name}; make one with: {again}")
    mine = facts.trained["adapter"][WEIGHTS]
    if not (merged / MERGED).is_file():
        raise UsageError(
            f"{merged} was not made by `lookonce adapter merge`, it lacks {MERGED}; make one with: {again}"
        )
    if read_object(merged / MERGED).get("made_from", {}).get("adapter") != mine:
        raise UsageError(
            f"{merged} was merged from another adapter than that of {folder.folder}; name the run that it was made "
            f"from, or merge this one into a new folder: {again}"
        )
    for name in weights:
        try:
            with safe_open(merged / name, framework="pt"):
                pass
        except SafetensorError as error:
            raise UsageError(f"{merged / name} is damaged ({error}); merge again into a new folder: {again}") from None
    patterns = (*weights, *OF_MODEL)
    paths = dict.fromkeys(path for pattern in patterns for path in sorted(merged.glob(pattern)) if path.is_file())
    files = {path.name: _reduced_file(path, facts.base) for path in paths}
    run = {key: text for key, text in _record(folder, facts).items() if key == RUN_FILE or key.startswith("metrics")}
    return _checked(folder, {**files, **run, CARD: card.encode()}, merged)


def _record(folder: RunFolder, facts: CardFacts) -> Files:
    """The run file, the record of the run, and the scores."""
    run = reduced_run(facts.run, facts.base)
    return {
        RUN_FILE: f"# Paths are reduced to their last part.\n{run.to_yaml()}".encode(),
        RECORD: _json({"run": run.model_dump(mode="json"), "inputs": folder.recorded_inputs()}),
        folder.trained.name: _json(facts.trained),
        **{f"metrics/{split}.json": _json(scores) for split, scores in facts.scores.items()},
    }


def _reduced_file(path: Path, base: BaseModel) -> Path | bytes:
    """A file of a model without folders of this machine; most stay as they are, byte for byte."""
    if path.suffix != ".json" or path.name in VERBATIM or path.name.endswith(".index.json"):
        return path
    value = read_json(path, MAX_JSON_BYTES)
    reduced = without_folders(value)
    if isinstance(value, dict) and isinstance(name := value.get("_name_or_path"), str) and Path(name).is_absolute():
        reduced["_name_or_path"] = base.name
    return path if reduced == value else _json(reduced)


def _checked(folder: RunFolder, files: Files, *folders: Path) -> Files:
    texts = {}
    for name, content in files.items():
        if isinstance(content, bytes):
            texts[name] = content.decode()
        elif content.suffix != ".safetensors" and name not in VERBATIM:
            texts[name] = content.read_text(encoding="utf-8", errors="replace")
    check_files(texts, [path.absolute() for path in (folder.folder, *folders, Path.cwd())])
    return files


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


TOKENS = "https://huggingface.co/settings/tokens"
LOG_IN = "hf auth login (or set HF_TOKEN)"


@dataclass(frozen=True)
class Options:
    """What the user may say of an upload."""

    merged: Path | None = None
    """The folder of the merged model, which is uploaded instead of the adapter."""
    base_model: str | None = None
    dataset: str | None = None
    licence: str | None = None
    is_public: bool = False
    branch: str | None = None
    """The branch that gets the commit; by default `main`."""


@dataclass(frozen=True)
class Upload:
    """What is to be uploaded, or was."""

    repository: str
    files: Files
    card: str
    facts: CardFacts
    options: Options
    commit: str | None = None
    """None if nothing was uploaded."""

    @property
    def url(self) -> str:
        return f"{constants.ENDPOINT}/{self.repository}"

    @property
    def start_from(self) -> str | None:
        """The value of `train.start_from` that names the adapter; None for a merged model, or before the upload."""
        return f"hf://{self.repository}@{self.commit}" if self.commit and not self.options.merged else None

    @property
    def sizes(self) -> dict[str, int]:
        files = self.files.items()
        return {name: len(content) if isinstance(content, bytes) else content.stat().st_size for name, content in files}

    @property
    def notes(self) -> list[str]:
        dataset, notes = self.facts.dataset, []
        if dataset.licence == UNKNOWN:
            notes.append(
                "the licence of the dataset is not known, as the card states; check it before you share the model "
                "(--dataset NAME names a known dataset)"
            )
        elif self.options.is_public:
            notes.append(f"the dataset's licence, {dataset.licence}, may bind the model; check that it may be public")
        if not self.facts.scores:
            notes.append("the run has no scores, as the card states; evaluate it with: lookonce eval RUN")
        return notes

    def to_json(self) -> dict[str, Any]:
        return {
            "repository": self.repository,
            "url": self.url,
            "is_private": not self.options.is_public,
            "branch": self.options.branch or constants.DEFAULT_REVISION,
            "commit": self.commit,
            "start_from": self.start_from,
            "files": self.sizes,
            "size_bytes": sum(self.sizes.values()),
            "base_model": asdict(self.facts.base),
            "dataset": asdict(self.facts.dataset),
            "card": self.card,
            "notes": self.notes,
        }

    def text(self) -> str:
        files = table(("file", "size"), [(name, size(number)) for name, number in self.sizes.items()])
        state = "public" if self.options.is_public else "private"
        total = f"{count(len(self.files), 'file')}, {size(sum(self.sizes.values()))}"
        lines = [
            ("repository", f"{self.repository}, {state}, branch {self.options.branch or constants.DEFAULT_REVISION}"),
            ("base model", self.facts.base.name),
            ("dataset", f"{self.facts.dataset.title}, licence {self.facts.dataset.licence}"),
            ("uploaded" if self.commit else "to upload", total),
        ]
        if self.commit:
            lines += [("commit", self.commit), ("page", self.url)]
        if self.start_from:
            lines.append(("to continue", f"train: {{start_from: {self.start_from}}}"))
        elif self.commit:
            lines.append(("to use", f"model: {{path: {self.repository}, revision: {self.commit}}}"))
        return f"{files}\n\n{rows(lines)}"


def prepare(folder: RunFolder, repository: str, options: Options) -> Upload:
    """What would be uploaded of a run, whose adapter was checked; asks no other machine.

    Raises:
        UsageError: a name is malformed, or the base model's or the dataset's is not known.
    """
    if not is_hub_name(repository):
        raise UsageError(
            f"{repository!r} is not the name of a repository on the Hub; write OWNER/NAME, such as your-name/kvasir"
        )
    base = find_base_model(folder.read_run().model, options.base_model)
    facts = facts_of(folder, base, options.dataset)
    merged = options.merged
    text = card(facts, repository, is_merged=merged is not None, licence=options.licence, revision=options.branch)
    files = merged_files(folder, merged, facts, text) if merged else adapter_files(folder, facts, text)
    return Upload(repository, files, text, facts, options)


def push(upload: Upload) -> Upload:
    """Upload it; returns it with its commit.

    Raises:
        UploadError: there is no token, it may not write, the Hub cannot be reached, or the repository is public.
    """
    if constants.HF_HUB_OFFLINE:
        raise UploadError(
            "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or run this with internet access"
        )
    if get_token() is None:
        raise UploadError(f"no access token of the Hub; make one that may write at {TOKENS}, then: {LOG_IN}")
    api, name, options = HfApi(), upload.repository, upload.options
    message = f"Upload {'a merged model' if options.merged else 'an adapter'} with lookonce"
    added = [
        CommitOperationAdd(path, str(content) if isinstance(content, Path) else content)
        for path, content in upload.files.items()
    ]
    try:
        if not options.is_public and _is_public(api, name):
            raise UploadError(f"{name} exists and is public; add --public to upload to it, or choose another name")
        api.create_repo(name, private=not options.is_public, exist_ok=True)
        if options.branch:
            api.create_branch(name, branch=options.branch, exist_ok=True)
        done = api.create_commit(name, added, commit_message=message, revision=options.branch)
    except UploadError:
        raise
    except Exception as error:  # from httpx, from huggingface_hub, from hf_xet
        raise UploadError(_refusal(name, error)) from None
    return replace(upload, commit=str(done.oid))


def _is_public(api: HfApi, name: str) -> bool:
    """Whether there is such a repository that everybody sees."""
    try:
        return api.model_info(name).private is False
    except RepositoryNotFoundError:
        return False


def _refusal(name: str, error: Exception) -> str:
    owner = name.partition("/")[0]
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if status in (401, 403) or isinstance(error, LocalTokenNotFoundError | RepositoryNotFoundError):
        return (
            f"the access token may not write to {name}; name an account or organisation of yours instead of {owner} "
            f"(hf auth whoami), or make a token that may write at {TOKENS}, then: {LOG_IN}"
        )
    if not isinstance(error, BadRequestError) and (status is None or status >= 500):
        return (
            f"the Hub cannot be reached ({first_line(error)}); nothing was committed. With internet access, run the "
            "same command again: files that were sent are not sent again"
        )
    return f"the Hub refuses the upload to {name}: {first_line(error)}"
