"""Prepare a set: read it, clean it, split it, write records, say what became of every row.

Design: reading is what takes long, and goes on where it was interrupted; all else is done in one go from the journal,
with the text of all rows in memory and no image. Parquet files of Kvasir-VQA's shape (61,177 rows, 6,500 images,
1.57 GB) take 45 s and 0.37 GB on two shared cores, most of it pyarrow's decoding of 15 GB of repeated images and the
disk; 159,549 rows about 6,449 image files take 45 s and 0.57 GB. The report is written last and says that the set is
complete. A folder belongs to one preparation: another one, or one with other settings, is refused and never mixed in.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare.build_records import Lists, compose, write_parts
from lookonce.datasets.prepare.definition import Definition, HubSection, find_definition
from lookonce.datasets.prepare.duplicates import Policy
from lookonce.datasets.prepare.extract import extract
from lookonce.datasets.prepare.hub import download
from lookonce.datasets.prepare.journal import REPORT, WORK, Journal, check_settings
from lookonce.datasets.prepare.sources import Source, find_source
from lookonce.datasets.prepare.splits import PARTS
from lookonce.errors import SourceError, UsageError
from lookonce.files import write_json
from lookonce.text import Notify, count

VERSION = 1
"""Of what is made of the same source with the same settings."""


@dataclass(frozen=True)
class Options:
    """What the command line says; None leaves it to the definition."""

    source: str | None = None
    """A path, or the name of a set on the Hub."""
    revision: str | None = None
    form: str | None = None
    image_root: Path | None = None
    split: str | None = None
    """`image`, `official`, or a file with lists of image names."""
    seed: int | None = None
    duplicates: Policy | None = None
    num_variants: int = 0


DEFAULTS = Options()


@dataclass(frozen=True)
class Prepared:
    """A complete set."""

    folder: Path
    report: dict[str, Any]
    fresh: bool
    """False if it was there already."""


def prepare(name: str, folder: Path, options: Options = DEFAULTS, notify: Notify = lambda text: None) -> Prepared:
    """Make `train.jsonl`, `val.jsonl`, `test.jsonl`, `images/` and `report.json` in `folder`.

    `name` is a known set or the path of a YAML file. `notify` gets notes for a person.

    Raises:
        LookonceError: there is no such set or source, it can not be read, or the folder holds something else.
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
    journal = Journal(folder)
    if (folder / REPORT).exists():
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        check_settings(folder, report["settings"], settings)
        journal.clear()  # killed after the report it would still be there
        return Prepared(folder, report, fresh=False)
    with journal.held():
        journal.begin(settings)
        extract(source, definition, options.num_variants, journal)
        rows, columns = journal.read()
        composed = compose(rows, columns, definition, source, settings, lists)
        write_parts(folder, composed, definition)
        report = composed.report.to_json()
        write_json(folder / REPORT, report)
        journal.clear()
    return Prepared(folder, report, fresh=True)


def resolve(definition: Definition, options: Options) -> Definition:
    """The definition with what the command line replaces in it.

    Raises:
        UsageError: an option does not fit it.
    """
    if options.num_variants and not definition.variants:
        raise UsageError(
            f"{definition.name} has no transformed variants; leave --variants out or list them in its YAML"
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
        raise UsageError(f"{folder} is not empty and holds no prepared set; choose another folder or empty it")


def open_source(definition: Definition, options: Options, notify: Notify) -> Source:
    """Where the set is, downloaded if it is on the Hub.

    Raises:
        LookonceError: it is nowhere.
    """
    place = options.source
    if place is not None and (Path(place).exists() or not _is_hub_name(place)):
        if options.revision:
            raise UsageError(f"--revision is of a set on the Hub, and {place} is a path; leave it out")
        source = find_source(Path(place), definition, options.form, options.image_root)
    else:
        hub = _hub(definition, place)
        source = download(hub, definition, options.revision, options.form, options.image_root)
        licence = f", licence there: {source.licence}" if source.licence else ""
        notify(f"{hub.id} at commit {source.revision}{licence}; the same again: --revision {source.revision}")
    notify(f"reading {count(len(source.files), f'{source.form} file')}{_left_alone(source)}")
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


def _is_hub_name(place: str) -> bool:
    return place.count("/") == 1 and not place.startswith((".", "/", "~"))


def _left_alone(source: Source) -> str:
    if not source.left:
        return ""
    named = ", ".join(source.left[:3]) + (", ..." if len(source.left) > 3 else "")
    return f"; left alone: {named} (--format chooses)"


def read_lists(split: str | None) -> Lists | None:
    """Image names by part, from the file that --split names; None if it names none.

    Raises:
        UsageError: it is no such file, or an image is in two of its lists.
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
        raise UsageError(f"{split} has image {double[0]} in two parts; it may be in one")
    return {part: value.get(part, []) for part in PARTS}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
