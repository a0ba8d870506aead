"""A set on the Hugging Face Hub, downloaded at one commit.

Design: what is downloaded is always a commit, never a branch. Where neither the definition nor the user names one, it
is what the branch `main` is now; its hash is printed and stands in the report, and `--revision` pins it the next time.
Files go into the Hub's own cache, so that other tools find them there and an interrupted download goes on.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.datasets.prepare.definition import Definition, HubSection
from lookonce.datasets.prepare.sources import Source, find_source
from lookonce.errors import SourceError

COMMIT = re.compile(r"[0-9a-f]{40}")
ALWAYS = ["README.md", "LICENSE*"]


class Progress(tqdm):  # type: ignore[type-arg]
    """A bar on a screen, and nothing in a log."""

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options | {"disable": options.get("disable") or None})


def download(
    hub: HubSection,
    definition: Definition,
    revision: str | None = None,
    form: str | None = None,
    image_root: Path | None = None,
    endpoint: str | None = None,
) -> Source:
    """The source that a set on the Hub is, after it was downloaded; `endpoint` is another Hub than the usual one.

    Raises:
        SourceError: it can not be had.
    """
    from huggingface_hub import snapshot_download

    wanted = revision or hub.revision
    try:
        commit, licence = _resolve(hub.id, wanted, endpoint)
        folder = snapshot_download(
            hub.id,
            repo_type="dataset",
            revision=commit,
            allow_patterns=[*hub.files, *ALWAYS],
            endpoint=endpoint,
            tqdm_class=Progress,  # type: ignore[arg-type]  # any kind of tqdm will do
        )
    except Exception as error:  # of requests and httpx, of the Hub's own, of the disk
        raise _not_had(hub.id, wanted, error) from None
    source = find_source(Path(folder), definition, form, image_root)
    return replace(source, place=hub.id, revision=commit, licence=licence)


def _resolve(name: str, revision: str | None, endpoint: str | None) -> tuple[str, str | None]:
    """The commit that a revision is, and the licence that the set's card names."""
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=endpoint).dataset_info(name, revision=revision)
    except Exception:
        if revision and COMMIT.fullmatch(revision):  # what is in the Hub's cache can be had without the Hub
            return revision, None
        raise
    if not info.sha:
        raise ValueError("the Hub names no commit")
    return info.sha, _licence(info)


def _licence(info: Any) -> str | None:
    card = info.card_data.to_dict() if info.card_data else {}
    licence = card.get("license") or next(
        (tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")), None
    )
    return ", ".join(licence) if isinstance(licence, list) else licence


def _not_had(name: str, revision: str | None, error: Exception) -> SourceError:
    at = f" at revision {revision}" if revision else ""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return SourceError(
        f"can not download {name}{at} from the Hub: {reason}\n"
        "Check the network and the name; for a set that asks for consent, log in with `hf auth login`. A copy that you "
        "have is read with --source DIR"
    )
