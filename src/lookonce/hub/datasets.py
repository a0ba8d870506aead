"""Datasets of the Hub.

Design: a dataset is always downloaded at a commit, never at a branch: without a revision, at the commit that `main` is
now.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download

from lookonce.errors import SourceError
from lookonce.hub.names import CARD, Download, check_disk, is_commit
from lookonce.hub.progress import Progress
from lookonce.hub.verify import verify
from lookonce.text import first_line

DATASET_INFO = (CARD, "LICENSE*")
"""Files of a dataset that are always downloaded with it."""


def download_dataset(name: str, revision: str | None, files: Sequence[str]) -> Download:
    """Download the files of a dataset that match some patterns.

    Raises:
        SourceError: it is not available, or is not what the Hub states.
    """
    try:
        commit, license = _resolve(name, revision)
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision=commit,
            allow_patterns=[*files, *DATASET_INFO],
            tqdm_class=Progress,  # type: ignore[arg-type]  # any kind of tqdm will do
        )
    except Exception as error:  # from httpx, from huggingface_hub, from the disk
        check_disk(error)
        at = f" at revision {revision}" if revision else ""
        raise SourceError(
            f"cannot download {name}{at} from the Hub: {first_line(error)}\n"
            "Check the network and the name; for a dataset that requires consent, log in with `hf auth login`. Read a "
            "local copy with --source DIR"
        ) from None
    verify("dataset", name, Path(folder), files)
    return Download(Path(folder), commit, license)


def _resolve(name: str, revision: str | None) -> tuple[str, str | None]:
    """The commit that a revision is, and the licence that the dataset's card names."""
    try:
        info = HfApi().dataset_info(name, revision=revision)
    except Exception:
        if revision and is_commit(revision):  # maybe downloaded before
            return revision, None
        raise
    if not info.sha:
        raise ValueError("the Hub names no commit")
    return info.sha, _license_of_dataset(info)


def _license_of_dataset(info: Any) -> str | None:
    card = info.card_data.to_dict() if info.card_data else {}
    license = card.get("license") or next(
        (tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")), None
    )
    return ", ".join(license) if isinstance(license, list) else license
