"""Models, adapters and datasets on the Hugging Face Hub: downloaded, verified, and found where there is no internet.

names     names of repositories and revisions, and what all downloads have
progress  the progress bar
verify    whether files have the content that the Hub states
unlisted  files that the Hub does not list and that would be read
models    models
adapters  adapters, from which a training starts
datasets  datasets

Design: huggingface_hub keeps the files in the folder that HF_HOME names, where other tools find them, and resumes
interrupted downloads. Offline it finds what was downloaded online: a commit by its hash, a branch or tag as it was
then. Other packages import from here, not from the modules.
"""

from lookonce.hub.adapters import ADAPTER_FILES, find_adapter
from lookonce.hub.datasets import download_dataset
from lookonce.hub.models import (
    FILES,
    ModelDownload,
    check_name,
    download_model,
    find_model,
    license_of_model,
    locate,
)
from lookonce.hub.names import CARD, FETCH_COMMAND, Download, is_commit, is_hub_name

__all__ = [
    "ADAPTER_FILES",
    "CARD",
    "FETCH_COMMAND",
    "FILES",
    "Download",
    "ModelDownload",
    "check_name",
    "download_dataset",
    "download_model",
    "find_adapter",
    "find_model",
    "is_commit",
    "is_hub_name",
    "license_of_model",
    "locate",
]
