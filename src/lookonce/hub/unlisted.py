"""Files in a downloaded folder that the Hub does not list and that a program would read.

Design: a loader reads what it finds: an index that the Hub does not have replaces the weights, a chat template the
prompts, an `adapter_config.json` the model, a table is read as more rows. So such files are refused by their names.
Others, such as notes, are left alone, and so is what begins with a dot. A link to a folder is refused: the Hub has
none, and what lies behind it would not be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
SETTINGS = ("*.json", "*.jinja", "*.py", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Index, configurations, tokenizer, processor, chat templates and code."""
ROWS = ("*.parquet", "*.tar", "*.csv", "*.json", "*.jsonl", "*.zip", "*.py")
READ = {"model": WEIGHTS + SETTINGS, "adapter": WEIGHTS + SETTINGS, "dataset": ROWS}
"""The files that programs read in a folder, by what it holds."""


def unlisted(
    folder: Path, names: Iterable[str], stated: Collection[str], kind: str, patterns: Sequence[str] = ()
) -> list[str]:
    """Those of some names in a folder that the Hub has not `stated` as files, and that would be read, sorted.

    `kind` is `model`, `adapter` or `dataset`; `patterns` are those of more files that will be read.
    """
    wanted = (*READ[kind], *patterns)
    seen = (name for name in names if not _is_hidden(name))
    return sorted(name for name in seen if (folder / name).is_dir() or (name not in stated and _matches(name, wanted)))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path or its last part matches a pattern; readers do not tell A from a."""
    name = name.lower()
    candidates = name, PurePosixPath(name).name
    return any(fnmatchcase(one, pattern.lower()) for one in candidates for pattern in patterns)
