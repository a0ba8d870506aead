"""Upload an adapter or a merged model to the Hugging Face Hub.

Design: huggingface_hub makes the repository and one commit of all files, so a reader never sees half of an upload; what
an interrupted one has sent need not be sent again. A new repository is private unless the user says otherwise, and a
public one is never written to without the user saying so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import (
    BadRequestError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from lookonce.adapter.upload.base_model import find_base_model
from lookonce.adapter.upload.card import card
from lookonce.adapter.upload.facts import UNKNOWN, CardFacts, facts_of
from lookonce.adapter.upload.files import UploadFile, adapter_files, merged_files
from lookonce.errors import UploadError, UsageError
from lookonce.hub import is_hub_name
from lookonce.run.folder import RunFolder
from lookonce.text import count, first_line, rows, size, table

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
    message: str | None = None


@dataclass(frozen=True)
class Upload:
    """What is to be uploaded, or was."""

    repository: str
    files: list[UploadFile]
    facts: CardFacts
    options: Options
    commit: str | None = None
    """None if nothing was uploaded."""

    @property
    def card(self) -> str:
        return next(
            one.content.decode() for one in self.files if isinstance(one.content, bytes) and one.name == "README.md"
        )

    @property
    def url(self) -> str:
        return f"{constants.ENDPOINT}/{self.repository}"

    @property
    def start_from(self) -> str | None:
        """The value of `train.start_from` that names the adapter; None for a merged model, or before the upload."""
        return f"hf://{self.repository}@{self.commit}" if self.commit and not self.options.merged else None

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.files)

    @property
    def notes(self) -> list[str]:
        """What the user should check."""
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
            "files": {one.name: one.size_bytes for one in self.files},
            "size_bytes": self.size_bytes,
            "base_model": asdict(self.facts.base),
            "dataset": asdict(self.facts.dataset),
            "card": self.card,
            "notes": self.notes,
        }

    def text(self) -> str:
        """For people."""
        files = table(("file", "size"), [(one.name, size(one.size_bytes)) for one in self.files])
        state = "public" if self.options.is_public else "private"
        total = f"{count(len(self.files), 'file')}, {size(self.size_bytes)}"
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
    """What would be uploaded of a run; asks no other machine.

    Raises:
        RunFolderError: the run is not trained.
        UsageError: a name is malformed, or the base model's or the dataset's is not known.
    """
    if not is_hub_name(repository):
        raise UsageError(
            f"{repository!r} is not the name of a repository on the Hub; write OWNER/NAME, such as your-name/kvasir"
        )
    run = folder.read_run()
    folder.check_adapter()
    base = find_base_model(run.model, options.base_model)
    facts = facts_of(folder, base, options.dataset)
    merged = options.merged
    text = card(facts, repository, is_merged=merged is not None, licence=options.licence, revision=options.branch)
    files = merged_files(folder, merged, facts, text) if merged else adapter_files(folder, facts, text)
    return Upload(repository, files, facts, options)


def push(upload: Upload) -> Upload:
    """Upload it; returns it with its commit.

    Raises:
        UploadError: there is no token, it may not write, the Hub cannot be asked, or the repository is public.
    """
    if constants.HF_HUB_OFFLINE:
        raise UploadError(
            "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or run this where there is internet"
        )
    if get_token() is None:
        raise UploadError(f"no access token of the Hub; make one that may write at {TOKENS}, then: {LOG_IN}")
    try:
        commit = _push(HfApi(), upload)
    except Exception as error:  # from httpx, from huggingface_hub, from hf_xet
        raise UploadError(_refusal(upload.repository, error)) from None
    return Upload(upload.repository, upload.files, upload.facts, upload.options, commit)


def _push(api: HfApi, upload: Upload) -> str:
    name, options = upload.repository, upload.options
    if _is_public(api, name) and not options.is_public:
        raise UploadError(f"{name} exists and is public; add --public to upload to it, or choose another name")
    api.create_repo(name, private=not options.is_public, exist_ok=True)
    if options.branch:
        api.create_branch(name, branch=options.branch, exist_ok=True)
    message = options.message or f"Upload {'a merged model' if options.merged else 'an adapter'} with lookonce"
    added = operations(upload.files)
    return str(api.create_commit(name, added, commit_message=message, revision=options.branch).oid)


def operations(files: Sequence[UploadFile]) -> list[CommitOperationAdd]:
    """The files as huggingface_hub takes them."""
    return [
        CommitOperationAdd(one.name, str(one.content) if isinstance(one.content, Path) else one.content)
        for one in files
    ]


def _is_public(api: HfApi, name: str) -> bool:
    """Whether there is such a repository that everybody sees."""
    try:
        return api.model_info(name).private is False
    except RepositoryNotFoundError:
        return False


def _refusal(name: str, error: Exception) -> str:
    """What is wrong, and what to do about it."""
    if isinstance(error, UploadError):
        return str(error)
    owner = name.partition("/")[0]
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return f"the Hub does not accept the access token; make one that may write at {TOKENS}, then: {LOG_IN}"
    if status == 403:
        return (
            f"your access token may not write to {name}; name an account or organisation of yours instead of {owner}, "
            f"or make a token that may write at {TOKENS}, then: {LOG_IN}"
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"{name} cannot be made or seen; check that {owner} is your account or your organisation: hf auth whoami"
    if isinstance(error, BadRequestError):
        return f"the Hub refuses the upload to {name}: {first_line(error)}"
    if isinstance(error, OfflineModeIsEnabled) or status is None or status >= 500:
        return (
            f"the Hub cannot be asked ({first_line(error)}); nothing was committed. Where there is internet, run the "
            "same command again: files that were sent are not sent again"
        )
    return f"the Hub refuses the upload to {name}: {first_line(error)}"
