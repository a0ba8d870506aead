"""Adapters of the Hub, from which a training starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lookonce.errors import ModelError
from lookonce.hub.names import FETCH_COMMAND, check_disk
from lookonce.hub.progress import Progress
from lookonce.hub.verify import verify
from lookonce.text import first_line

ADAPTER_FILES = ["adapter_model.safetensors", "adapter_config.json", "run.json", "trained.json"]
"""The files of an uploaded adapter that a training starts from: weights, shape, and the record of the run."""


def find_adapter(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of an adapter that `lookonce adapter push` uploaded; downloaded unless `is_local` or here already.

    Its last part is the commit.

    Raises:
        ModelError: it is not available, or is not what the Hub states.
    """
    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": ADAPTER_FILES, "tqdm_class": Progress}
    at = f"adapter {name}" + (f" at revision {revision}" if revision else "")
    try:
        folder = Path(snapshot_download(name, local_files_only=is_local, **wanted))
        if not is_local:
            verify("adapter", name, folder)
        return folder
    except LocalEntryNotFoundError as error:
        why = f", and the Hub cannot be asked for it ({first_line(error.__cause__)})" if error.__cause__ else ""
        raise ModelError(f"{at} is not on this machine{why}; where there is internet run: {FETCH_COMMAND}") from None
    except GatedRepoError:
        raise ModelError(
            f"{at} requires accepting its licence: do so at https://huggingface.co/{name}, then: hf auth login"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{at} does not exist; name a commit, a branch or a tag of it") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{at} is not on the Hub, or you may not access it; check the name, or if it is private: hf auth login"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        check_disk(error)
        raise ModelError(f"{at} is not available from the Hub ({first_line(error)})") from None
