"""Prepare a dataset: read it, clean it, split it, write records, and report the outcome of every row.

Design: the texts of all rows are in memory, and no image. Parquet files of Kvasir-VQA's shape (61,177 rows, 6,500
images, 1.57 GB) take 45 s and 0.37 GB on two shared cores, mostly for pyarrow to decode 15 GB of repeated images and
for the disk; 159,549 rows about 6,449 image files take 45 s and 0.57 GB. The report is written last and marks the
dataset as complete: after an interruption the same command begins again, and removes what was written before. A folder
belongs to one preparation: a complete one with another definition, source or options is refused.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.claim_file import FolderClaim
from lookonce.datasets.prepare.build_records import IMAGES, Lists, build_records, write_parts
from lookonce.datasets.prepare.definition import Definition, HubSection, find_definition
from lookonce.datasets.prepare.extract import extract
from lookonce.datasets.prepare.rows import PARTS, Policy
from lookonce.datasets.prepare.sources import Source, download_source, find_source
from lookonce.differences import differences
from lookonce.errors import SourceError, UsageError
from lookonce.files import read_object, write_json
from lookonce.hub import is_hub_name
from lookonce.text import Notify, count, listed, quiet

REPORT = "report.json"
WORK = ".prepare"
"""The folder that an unfinished dataset has, with the claim of the process that prepares it."""
VERSION = 1
"""The version of the output for the same source and settings."""


@dataclass(frozen=True)
class Options:
    """The options of the command line; None means the value of the definition."""

    source: str | None = None
    """A path, or the name of a dataset on the Hub."""
    revision: str | None = None
    format: str | None = None
    image_root: Path | None = None
    split: str | None = None
    """`image`, `official`, or the path of a JSON file with lists of image names."""
    seed: int | None = None
    duplicates: Policy | None = None
    num_variants: int = 0


DEFAULTS = Options()


@dataclass(frozen=True)
class Prepared:
    """A complete dataset."""

    folder: Path
    report: dict[str, Any]
    is_new: bool
    """False if the folder held the complete dataset before."""


def prepare(name: str, folder: Path, options: Options = DEFAULTS, notify: Notify = quiet) -> Prepared:
    """Make `train.jsonl`, `val.jsonl`, `test.jsonl`, `images/` and `report.json` in `folder`.

    `name` is a known dataset or the path of a YAML file.

    Raises:
        LookonceError: there is no such dataset or source, it cannot be read, or the folder holds something else.
    """
    definition = resolve(find_definition(name), options)
    lists = read_lists(options.split)
    check_folder(folder)
    notify(f"{definition.title or definition.name}, licence {definition.licence}; {definition.homepage}".strip("; "))
    source = open_source(definition, options, notify)
    settings = {
        "version": VERSION,
        "definition": definition.model_dump(mode="json", by_alias=True),
        "variants": options.num_variants,
        "lists": lists,
        "source": source.identity(),
    }
    if complete := find_complete(folder, settings):
        return complete
    with FolderClaim(folder / WORK / "claim.json", "lookonce data prepare") as claim:
        if used_by := claim.take():
            raise UsageError(f"{folder} is in use by {used_by}; wait until it has ended, or stop it")
        if complete := find_complete(folder, settings):  # by another process, since
            return complete
        shutil.rmtree(folder / IMAGES, ignore_errors=True)  # what an unfinished preparation has left
        for leftover in (path for part in PARTS for path in folder.glob(f"{part}.jsonl*")):
            leftover.unlink()
        rows, columns = extract(source, definition, options.num_variants, folder / IMAGES)
        parts, report = build_records(rows, columns, definition, source, settings, lists)
        write_parts(folder, parts, definition)
        write_json(folder / REPORT, report)
    shutil.rmtree(folder / WORK, ignore_errors=True)
    return Prepared(folder, report, is_new=True)


def find_complete(folder: Path, settings: dict[str, Any]) -> Prepared | None:
    """The complete dataset that the folder holds; None if it holds none.

    Raises:
        UsageError: it has other settings, or its report is damaged; names the keys that differ.
    """
    if not (folder / REPORT).exists():
        return None
    report = read_object(folder / REPORT)
    if not isinstance(recorded := report.get("settings"), dict):
        raise UsageError(f"{folder / REPORT} is cut, or no report of lookonce data prepare; choose another folder")
    if differing := differences(recorded, json.loads(json.dumps(settings, default=str))):  # as it is read back
        shown = "\n".join(f"  {name}: {there!r} there, {now!r} now" for name, there, now in differing[:5])
        raise UsageError(
            f"{folder} was prepared with other settings, {count(len(differing), 'difference')}:\n{shown}\n"
            "Choose another folder, or remove this one"
        )
    shutil.rmtree(folder / WORK, ignore_errors=True)  # left if the process was killed after the report
    return Prepared(folder, report, is_new=False)


def resolve(definition: Definition, options: Options) -> Definition:
    """The definition with the options of the command line.

    Raises:
        UsageError: an option does not fit the definition.
    """
    if options.num_variants and not definition.variants:
        raise UsageError(
            f"{definition.name} has no augmented variants; leave out --variants, or add `variants` to its YAML file"
        )
    changes: dict[str, Any] = {}
    if options.split in ("image", "official"):
        changes["by"] = options.split
    if options.seed is not None:
        changes["seed"] = options.seed
    split = definition.split.model_copy(update=changes)
    return definition.model_copy(update={"split": split, "duplicates": options.duplicates or definition.duplicates})


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else.

    Raises:
        UsageError: it does.
    """
    if not folder.exists() or (folder / REPORT).exists() or (folder / WORK).exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty and holds no prepared dataset; choose another folder, or empty it")


def open_source(definition: Definition, options: Options, notify: Notify) -> Source:
    """The source of a dataset, downloaded if it is on the Hub.

    Raises:
        LookonceError: it is not available.
    """
    name = options.source
    if name is not None and (Path(name).exists() or not is_hub_name(name)):
        if options.revision:
            raise UsageError(f"--revision is for a dataset on the Hub, and {name} is a path; leave it out")
        source = find_source(Path(name), definition, options.format, options.image_root)
    else:
        hub = _hub(definition, name)
        source = download_source(hub, definition, options.revision, options.format, options.image_root)
        licence = f", licence there: {source.licence}" if source.licence else ""
        notify(f"{hub.id} at commit {source.revision}{licence}; to get the same again: --revision {source.revision}")
    ignored = f"; ignored: {listed(source.ignored, 3)} (--format chooses)" if source.ignored else ""
    notify(f"reading {count(len(source.files), f'{source.format} file')}{ignored}")
    return source


def _hub(definition: Definition, name: str | None) -> HubSection:
    if definition.hub and name in (None, definition.hub.id):
        return definition.hub
    if name is None:
        raise SourceError(
            f"{definition.name} is not on the Hub: get it from {definition.homepage or 'its publishers'} and name its "
            "folder with --source DIR"
        )
    return HubSection(id=name)


def read_lists(split: str | None) -> Lists | None:
    """Image names by part, from the file that --split names; None if it does not name a file.

    Raises:
        UsageError: the file does not hold such lists, or an image is in two of them.
    """
    if split in (None, "image", "official"):
        return None
    try:
        value = json.loads(Path(str(split)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--split {split} is neither `image` nor `official` nor a JSON file with lists of image names ({error})"
        ) from None
    if not isinstance(value, dict) or not set(value) <= set(PARTS) or not all(map(_is_names, value.values())):
        raise UsageError(f'{split} must be like {{"train": ["a", "b"], "val": ["c"], "test": ["d"]}}')
    parts_of = Counter(name for names in value.values() for name in set(names))
    double = sorted(name for name, number in parts_of.items() if number > 1)
    if double:
        raise UsageError(f"{split} has image {double[0]} in two parts; each image may be in one")
    return {part: value.get(part, []) for part in PARTS}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
