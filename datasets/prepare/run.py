"""Prepare a dataset: read it, clean it, split it, write records, and report the outcome of every row.

Design: the texts of all rows are in memory, and no image. Parquet files of Kvasir-VQA's shape (61,177 rows, 6,500
images, 1.57 GB) take 45 s and 0.37 GB on two shared cores, mostly for pyarrow to decode 15 GB of repeated images and
for the disk; 159,549 rows about 6,449 image files take 45 s and 0.57 GB. The report is written last and marks the
dataset as complete: after an interruption the same command begins again, and ends with the same bytes, because nothing
in the report depends on the time or the machine.

Rows are split before duplicates are joined, so an official split by question never merges a training row with a test
row. The split is drawn from all images that were read, so a change of rules does not change it. A changed record has
the texts before the rules as `original` in its metadata. Rows that were read equal the records plus the rows left out,
each for one reason; a test checks the sum.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from lookonce.claim_file import FolderClaim
from lookonce.datasets.formats.registry import checked
from lookonce.datasets.prepare.definition import Definition, HubSection, QuestionSection, find_definition
from lookonce.datasets.prepare.rows import (
    DUPLICATES,
    PARTS,
    Policy,
    RecordRows,
    Row,
    clean,
    families,
    join_duplicates,
    measure_leaks,
    sample,
    split_by_image,
    split_by_lists,
)
from lookonce.datasets.prepare.sources import Source, download_source, extract, find_source
from lookonce.datasets.records import Record, Turn, write_records
from lookonce.errors import ImageError, SourceError, UsageError
from lookonce.files import hash_file, read_object, write_json
from lookonce.hub import is_hub_name
from lookonce.settings import differences
from lookonce.text import Notify, count, first_line, in_yaml, listed, nfc, quiet, rows, shell, shown, table

REPORT = "report.json"
WORK = ".prepare"
"""The folder that an unfinished dataset has, with the claim of the process that prepares it."""
VERSION = 2
"""The version of the output for the same source and settings."""
NUM_SHOWN = 5
IMAGES = "images"
Lists = Mapping[str, Sequence[str]]
"""Names of images by part."""
LISTS = TypeAdapter(dict[Literal["train", "val", "test"], list[str]])
Parts = Mapping[str, Sequence[RecordRows]]
"""The rows of each record, by part."""
OFFICIAL = "the set itself"
"""The split of the dataset's publishers, as reports call it."""


@dataclass(frozen=True)
class Options:
    """The options of the command line; None means the value of the definition."""

    source: str | None = None
    """A path, or the name of a dataset on the Hub."""
    revision: str | None = None
    image_root: Path | None = None
    split: str | None = None
    """`image`, `official`, or the path of a JSON file with lists of image names."""
    seed: int | None = None
    duplicates: Policy | None = None


@dataclass(frozen=True)
class Prepared:
    folder: Path
    report: dict[str, Any]
    is_new: bool
    """False if the folder held the complete dataset before."""


def prepare(name: str, folder: Path, options: Options, notify: Notify = quiet) -> Prepared:
    """Make `train.jsonl`, `val.jsonl`, `test.jsonl`, `images/` and `report.json` in `folder`.

    `name` is a known dataset or the path of a YAML file.

    Raises:
        LookonceError: there is no such dataset or source, it cannot be read, or the folder holds something else.
    """
    definition = resolve(find_definition(name), options)
    lists = read_lists(options.split)
    if not (folder / REPORT).exists() and not (folder / WORK).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is not empty and holds no prepared dataset; choose another folder, or empty it")
    notify(f"{definition.title or definition.name}, licence {definition.licence}; {definition.homepage}".strip("; "))
    source = open_source(definition, options, folder, notify)
    settings = {
        "version": VERSION,
        "definition": definition.model_dump(
            mode="json", by_alias=True, exclude=set() if definition.samples else {"samples"}
        ),
        "lists": lists,
        "source": {"format": source.format, "revision": source.revision, "files": source.files},
    }
    if complete := find_complete(folder, settings, source):
        return complete
    with FolderClaim(folder / WORK / "claim.json", "lookonce data prepare") as claim:
        if used_by := claim.take():
            raise UsageError(f"{folder} is in use by {used_by}; wait until it has ended, or stop it")
        if complete := find_complete(folder, settings, source):  # by another process, since
            return complete
        settings["content"] = _content(source)
        shutil.rmtree(folder / IMAGES, ignore_errors=True)  # what an unfinished preparation has left
        for name in (*(f"{part}.jsonl" for part in (*PARTS, *definition.samples)), REPORT):
            for leftover in folder.glob(f"{name}*"):
                leftover.unlink()
        rows, columns = extract(source, definition, folder / IMAGES)
        parts, report = build_records(rows, columns, definition, source, settings, lists)
        write_parts(folder, parts, definition)
        write_json(folder / REPORT, report)
    shutil.rmtree(folder / WORK, ignore_errors=True)
    return Prepared(folder, report, is_new=True)


def _content(source: Source) -> dict[str, str]:
    """The hash of each file; a revision of the Hub has the same files always."""
    return {} if source.revision else {name: hash_file(source.root / name) for name in source.files}


def find_complete(folder: Path, settings: dict[str, Any], source: Source) -> Prepared | None:
    """The complete dataset in a folder, or None; raises UsageError if its settings differ, or it is damaged."""
    if not (folder / REPORT).exists():
        return None
    report = read_object(folder / REPORT)
    if not isinstance(recorded := report.get("settings"), dict):
        raise UsageError(f"{folder / REPORT} is damaged, or of another program; choose another folder")
    recorded = {**recorded}
    content = recorded.pop("content", {})  # which 0.3.0 has not recorded
    now = json.loads(json.dumps(settings, default=str))  # as it is read back
    differing = differences(recorded, now)
    if content and not differing:
        differing = differences({"content": content}, {"content": _content(source)})
    if differing:
        lines = "\n".join(f"  {name}: {there!r} there, {here!r} now" for name, there, here in differing[:5])
        raise UsageError(
            f"{folder} was prepared with other settings, {count(len(differing), 'difference')}:\n{lines}\n"
            "Choose another folder, or remove this one"
        )
    shutil.rmtree(folder / WORK, ignore_errors=True)  # left if the process was killed after the report
    return Prepared(folder, report, is_new=False)


def resolve(definition: Definition, options: Options) -> Definition:
    """The definition with the options of the command line."""
    changes: dict[str, Any] = {}
    if options.split in ("image", "official"):
        changes["by"] = options.split
    if options.seed is not None:
        changes["seed"] = options.seed
    split = definition.split.model_copy(update=changes)
    return definition.model_copy(update={"split": split, "duplicates": options.duplicates or definition.duplicates})


def open_source(definition: Definition, options: Options, folder: Path, notify: Notify) -> Source:
    """The source of a dataset, downloaded if it is on the Hub; raises LookonceError if it is not available."""
    name = options.source
    if name is not None and (Path(name).exists() or not is_hub_name(name)):
        if options.revision:
            raise UsageError(f"--revision is for a dataset on the Hub, and {name} is a path; leave it out")
        source = find_source(Path(name), definition, options.image_root, without=folder)
    else:
        if name is None and definition.hub is None:
            raise SourceError(
                f"{definition.name} is not downloaded: get it from {definition.homepage or 'its publishers'}, unpack "
                "it, and name its folder with --source DIR"
            )
        hub = definition.hub if definition.hub and name in (None, definition.hub.id) else HubSection(id=str(name))
        source = download_source(hub, definition, options.revision, options.image_root)
        licence = f", licence on the Hub: {source.licence}" if source.licence else ""
        notify(f"{hub.id} at commit {source.revision}{licence}; to get the same again: --revision {source.revision}")
    ignored = f"; ignored: {listed(source.ignored, 3)} (--source may name a file)" if source.ignored else ""
    notify(f"reading {count(len(source.files), f'{source.format} file')}{ignored}")
    return source


def read_lists(split: str | None) -> Lists | None:
    """Image names by part, from the file that --split names, or None; raises UsageError if it is wrong."""
    if split in (None, "image", "official"):
        return None
    try:
        value: Any = LISTS.validate_json(Path(str(split)).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--split {split} is neither `image` nor `official` nor a JSON file with lists of image names "
            f'({first_line(error)}); expected one like {{"train": ["a", "b"], "val": ["c"], "test": ["d"]}}'
        ) from None
    parts_of = Counter(name for names in value.values() for name in set(names))
    double = sorted(name for name, number in parts_of.items() if number > 1)
    if double:
        raise UsageError(f"{split} has image {double[0]} in two parts; each image may be in one")
    return {part: value.get(part, []) for part in PARTS}


# Records and report.


def build_records(
    rows: Sequence[Row],
    columns: Iterable[str],
    definition: Definition,
    source: Source,
    settings: Mapping[str, Any],
    lists: Lists | None = None,
) -> tuple[Parts, dict[str, Any]]:
    """The rows of the records of train, val and test, and the report; `columns` are all columns of the source.

    Raises:
        ImageError: no row has an image.
        SourceError: there are no rows, or the rules leave out all of them.
        UsageError: the requested split is impossible.
    """
    if not rows:
        raise SourceError(
            f"{source.location} has no rows: {listed([*source.files])} holds none; is the source complete?"
        )
    seen = [row for row in rows if row.key]
    if not seen:
        places = ", ".join(dict.fromkeys(map(str, source.image_roots)))
        raise ImageError(
            f"no row has an image; {len(rows):,} were tried, the first: {_reason(rows[0])}\n"
            f"searched for {', '.join(definition.images)} in {places} and beside "
            "the rows' files; name the folder of the images with --image-root"
        )
    split = choose_split(seen, definition, lists)
    cleaned, tallies = clean(rows, definition.rules)
    if not cleaned:
        raise SourceError(f"the rules of {definition.name} leave out all {len(rows):,} rows; check them")
    usable = [row for row in cleaned if row.key]
    parts: dict[str, list[RecordRows]] = {}
    duplicates = Counter(dict.fromkeys(DUPLICATES, 0))
    for part in PARTS:
        part_rows = [row for row in usable if split.part_of(row) == part]
        parts[part], counts = join_duplicates(part_rows, definition.duplicates)
        duplicates.update(counts)
    left_out = {tally.name: tally.dropped for tally in tallies} | {
        "no image": len(cleaned) - len(usable),
        "in no part of the split": sum(not split.part_of(row) for row in usable),
        "the same as another row": duplicates["num_identical"],
        "merged into another row's record": duplicates["num_merged"],
        "answered differently by another row": duplicates["num_dropped"],
    }
    of_records = [record_rows[0] for part in PARTS for record_rows in parts[part]]
    names_of: dict[str, set[str]] = {}
    for row in seen:
        names_of.setdefault(row.key, set()).add(row.image_id)
    has_own = split.by != OFFICIAL and any(row.split for row in seen)
    known = definition.questions
    samples, described = _samples(rows, definition, {row.key for (row, *_) in parts["train"]}, families(seen))
    return parts | samples, {
        "name": definition.name,
        "title": definition.title,
        "licence": definition.licence,
        "homepage": definition.homepage,
        "source": {
            "location": source.location,
            "format": source.format,
            "revision": source.revision,
            "licence": source.licence,
            "num_files": len(source.files),
            "num_bytes": sum(source.files.values()),
            "files_left_alone": list(source.ignored),
        },
        "columns_left_out": sorted({*columns} - definition.used_columns),
        "published": dict(definition.counts),
        "rows": {
            "read": len(rows),
            "records": len(of_records),
            "left_out": {reason: number for reason, number in left_out.items() if number},
        },
        "rules": [asdict(tally) for tally in tallies],
        "duplicates": {"policy": definition.duplicates, **duplicates},
        "images": {
            "written": len(names_of),
            "names": len({name for names in names_of.values() for name in names if name}),
            "in_no_record": len(names_of.keys() - {row.key for row in of_records}),
            "with_several_names": sum(len(names) > 1 for names in names_of.values()),
            "not_found": dict(Counter(_reason(row) for row in cleaned if not row.key).most_common(NUM_SHOWN)),
        },
        "split": _describe(split, seen, of_records),
        "official_split": _describe(OFFICIAL_SPLIT, seen, of_records) if has_own else None,
        "samples": described,
        "questions_not_in_the_definition": sum(nfc(row.question) not in known for row in of_records) if known else None,
        "settings": dict(settings),
    }


def _samples(
    rows: Sequence[Row], definition: Definition, training: Iterable[str], family_of: Mapping[str, str]
) -> tuple[dict[str, list[RecordRows]], dict[str, Any]]:
    """The rows of each sample of a definition, and what the report says of them; one that is not whole has no rows."""
    samples: dict[str, list[RecordRows]] = {}
    described: dict[str, Any] = {}
    trained = {family_of[key] for key in training}
    for name, drawn in definition.samples.items():
        chosen = sample(rows, drawn.of, drawn.where, drawn.seed, drawn.num_rows)
        usable = [row for row in chosen if row.key and row.question.strip() and row.answer.strip()]
        missing = drawn.num_rows - len(usable)
        samples[name] = [] if missing else [(row,) for row in chosen]
        described[name] = {
            "of": drawn.of,
            "rows": drawn.num_rows,
            "missing": missing,
            "about_images_in_train": sum(family_of[row.key] in trained for row in usable),
        }
    return samples, described


def _describe(split: Split, rows: Sequence[Row], of_records: Sequence[Row]) -> dict[str, Any]:
    """A split in the report: the images of all rows and the records by part, and what of val and test is in train."""
    parts = [split.part_of(row) for row in of_records]
    return {
        "by": split.by,
        "records": {part: parts.count(part) for part in PARTS},
        "images": {part: len({row.key for row in rows if split.part_of(row) == part}) for part in PARTS},
        "leaks": measure_leaks([row.key for row in of_records], parts, families(rows)),
    }


def _reason(row: Row) -> str:
    return f"{row.problem}: {shown(row.image_id)}" if row.image_id else f"{row.problem} ({row.origin})"


def report_text(value: Mapping[str, Any]) -> str:
    rules = [(tally["name"], f"{tally['changed']:,}", f"{tally['dropped']:,}") for tally in value["rules"]]
    sections = [_head(value), table(("rule", "changed", "left out"), rules), _rows(value), _split(value["split"])]
    if value["official_split"]:
        sections.append("the official split, for comparison:\n" + _split(value["official_split"]))
    sections.append("\n".join(_sample(name, drawn) for name, drawn in value.get("samples", {}).items()))
    return "\n\n".join(section for section in sections if section)


def _head(value: Mapping[str, Any]) -> str:
    source, images, published = value["source"], value["images"], value["published"]
    numbers = [f"{published[key]:,} {key}" for key in ("rows", "images") if key in published]
    lines = [
        ("licence", value["licence"]),
        ("from", f"{source['location']} ({count(source['num_files'], source['format'] + ' file')})"),
        ("revision", source["revision"] or ""),
        ("not kept", ", ".join(value["columns_left_out"])),
        ("published", ", ".join(numbers)),
        ("images", _images(images)),
        ("not found", "; ".join(f"{reason} ({number:,})" for reason, number in images["not_found"].items())),
    ]
    return f"{value['title'] or value['name']}\n" + rows([line for line in lines if line[1]])


def _images(images: Mapping[str, Any]) -> str:
    text = f"{images['written']:,}"
    if images["with_several_names"]:
        text += f"; {images['with_several_names']:,} of them with several names, {images['names']:,} names in all"
    if images["in_no_record"]:
        text += f"; {images['in_no_record']:,} in no record, because all questions about them were left out"
    return text


def _rows(value: Mapping[str, Any]) -> str:
    numbers = value["rows"]
    lines = [("rows read", numbers["read"])]
    lines += [(reason, -number) for reason, number in numbers["left_out"].items()]
    lines.append(("records", numbers["records"]))
    text = table(("rows", "number"), [(name, f"{number:,}") for name, number in lines])
    unknown = value["questions_not_in_the_definition"]
    return text + (f"\n{count(unknown, 'record')} with questions that the definition does not list" if unknown else "")


def _split(split: Mapping[str, Any]) -> str:
    leaks = split["leaks"]
    lines = []
    for part in PARTS:
        if split["records"].get(part):
            leak = leaks.get(part)
            known = f"{leak['also_in_train']:,} ({leak['share']:.1%})" if leak else ""
            lines.append((part, f"{split['images'][part]:,}", f"{split['records'][part]:,}", known))
    text = table((f"split by {split['by']}", "images", "records", "images also in train"), lines)
    leaking = " and ".join(part for part, leak in leaks.items() if leak["also_in_train"])
    return text + (
        f"\n{leaking} has images that are also in train, so its score says little about new images" if leaking else ""
    )


def _sample(name: str, drawn: Mapping[str, Any]) -> str:
    if missing := drawn["missing"]:
        not_here = (
            f"{missing:,} of its {drawn['rows']:,} rows of {drawn['of']} are not in the source, or lack image or text"
        )
        return f"{name}.jsonl is not written: {not_here}"
    known = drawn["about_images_in_train"]
    return (
        f"{name}.jsonl: {drawn['rows']:,} rows of {drawn['of']} in a challenge's order, {known:,} about images in train"
    )


def next_steps(folder: Path, value: Mapping[str, Any]) -> str:
    """The commands to run next, and the section of the run file."""
    parts = [part for part in PARTS if value["split"]["records"].get(part)]
    keys = [f"  {part}: {in_yaml(folder / f'{part}.jsonl')}" for part in parts]
    audit = f"{shell('lookonce', 'data', 'audit', folder)}/*.jsonl"
    return "\n".join([f"check it: {audit}", "train on it, with this in a run file:", "data:", *keys])


def write_parts(folder: Path, parts: Parts, definition: Definition) -> None:
    images = folder / IMAGES
    for part, rows_of_records in parts.items():
        if rows_of_records:
            records = (checked(make_record(rows, images, definition)) for rows in rows_of_records)
            write_records(folder / f"{part}.jsonl", records)


def make_record(rows: RecordRows, images: Path, definition: Definition) -> Record:
    """The record of some rows with the same image and question."""
    first = rows[0]
    known = definition.questions.get(nfc(first.question), QuestionSection())
    values = {"img_id": first.image_id, "category": known.category, "stage": known.stage}
    metadata = {name: value for name, value in values.items() if value not in ("", None)} | dict(first.metadata)
    metadata |= {"official_split": first.split} if first.split else {}
    if len(rows) > 1:
        metadata["references"] = [row.answer for row in rows]
    if len(rows) > 1 or first.read_as:
        pairs = [row.as_read for row in rows]
        metadata["original"] = [{"question": question, "answer": answer} for question, answer in pairs]
    turn = Turn(first.question, first.answer)
    return Record((images / first.image,), (turn,), metadata=metadata, origin=first.origin)


# Splits.


@dataclass(frozen=True)
class Split:
    """A split: `part_of` returns the part of a row, or an empty text."""

    by: str
    part_of: Callable[[Row], str]


OFFICIAL_SPLIT = Split(OFFICIAL, attrgetter("split"))


def choose_split(rows: Sequence[Row], definition: Definition, lists: Lists | None) -> Split:
    """The requested split of rows with images; raises UsageError if it is impossible."""
    split = definition.split
    if lists is not None:
        of_name = split_by_lists({row.image_id for row in rows}, lists)
        if not any(of_name.values()):
            known = ", ".join(sorted(of_name)[:3])
            raise UsageError(f"no image of {definition.name} is in the lists of --split; expected names like {known}")
        return Split("lists", lambda row: of_name[row.image_id])
    if split.by == "official":
        if not any(row.split for row in rows):
            raise UsageError(
                f"the official split of {definition.name} is not in this source: expected a column "
                f"{' or '.join(definition.columns.split)}, or files called train, val and test; --split image draws a "
                "split"
            )
        return OFFICIAL_SPLIT
    for name in split.together:
        if not any(name in row.metadata for row in rows):
            column = " or ".join(f"`{column}`" for column in definition.columns.metadata[name])
            raise UsageError(f"split.together: no row has a {name}; expected a column {column} (columns.metadata)")
    of_key = split_by_image(rows, split.shares.model_dump(), split.seed, split.together)
    return Split(f"image, seed {split.seed}", lambda row: of_key[row.key])
