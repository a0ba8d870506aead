"""Images into WebDataset tars, and records that point into them.

    DIR/images-00000.tar     <key>.jpg, ...: each distinct image once, its bytes unchanged, named by its key
    DIR/images.ndjson         one line an image: where it is, which files it was, its bytes and its size
    DIR/train.jsonl          the records, their images as images-00000.tar/<key>.jpg

Design: images come in the order of `ImageIndex.path_of`, in which a cache is planned, so that a shard's images lie side
by side and a cache made from tars has the shards of one made from the files. Tars hold images and nothing else, unless
their questions are asked for: then a correction of a question leaves every tar as it is. The same input gives the same
bytes (times and owners are fixed). images.ndjson is written first and says what belongs into each tar; tars appear
whole under their names, and those that are there are kept, so a run that was interrupted goes on. A killed one leaves
a file with `.tmp-` in its name. The cost: every image is read twice, once to know its key and its size.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.datasets.audit.corpus import Material
from lookonce.datasets.audit.pictures import distinct
from lookonce.datasets.images import bytes_key
from lookonce.datasets.records import Record, write_records
from lookonce.datasets.tars import Tar, plan_tars, tar_size, write_tar
from lookonce.errors import DiskFull, ImageError, UsageError
from lookonce.files import TEMPORARY_MARK, temporary_name, write_text
from lookonce.text import count, rows, size

INDEX = "images.ndjson"  # not .jsonl: `*.jsonl` are the records
NUM_NAMED = 5
MARGIN = 1.02
"""Room that is asked for, as a multiple of what is to be written."""


@dataclass(frozen=True)
class PackReport:
    """What `pack` made."""

    folder: str
    num_images: int
    num_files: int
    """Names that the records had for them."""
    num_bytes: int
    """Of all tars."""
    tars: tuple[str, ...]
    num_kept: int
    """Tars that were there already."""
    records: Mapping[str, int]
    """Records written, by file."""
    left_out: Mapping[str, int]
    """Records without their images, by file."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        copies = f" ({self.num_files:,} names)" if self.num_files != self.num_images else ""
        kept = f", {self.num_kept:,} of them there already" if self.num_kept else ""
        lines = [
            ("images", f"{self.num_images:,}{copies}"),
            ("tars", f"{len(self.tars):,}, {size(self.num_bytes)}{kept}"),
        ]
        for name, number in self.records.items():
            without = f", {self.left_out[name]:,} left out without their images" if self.left_out[name] else ""
            lines.append((name, f"{count(number, 'record')}{without}"))
        return f"\n{self.folder}\n\n{rows(lines)}\n"


def pack(
    paths: Sequence[Path],
    folder: Path,
    image_root: Path | None = None,
    *,
    tar_bytes: int,
    skip_missing: bool = False,
    with_questions: bool = False,
) -> PackReport:
    """Write the images of some records files into tars below `folder`, and the records beside them.

    `with_questions` puts a JSON file beside each image, with its questions and answers by records file.

    Raises:
        RecordsError: a records file is missing or broken.
        ImageError: an image is missing, is none, or changed while it was packed; not with `skip_missing`.
        UsageError: the folder holds something else, or two records files have the same name.
        DiskFull: there is no room.
    """
    material = Material.read(paths, image_root)
    names = _names(paths)
    refuse_unusable(material, skip_missing)
    pictures = [picture for picture in distinct(material.pictures).values() if not picture.problem]
    questions = _questions(material) if with_questions else {}
    tars = plan_tars(pictures, tar_bytes)
    sizes = {tar.name: tar_size(tar, questions) for tar in tars}
    kept = {tar.name for tar in tars if _is_there(folder / tar.name, sizes[tar.name])}
    _check_room(folder, sum(number for name, number in sizes.items() if name not in kept))
    _claim(folder, _index(tars, material, image_root, questions))
    with tqdm(total=len(pictures), desc="pack images", unit="image", leave=False, disable=None) as progress:
        for tar in tars:
            if tar.name not in kept:
                write_tar(folder, tar, questions, progress.update)
            else:
                progress.update(len(tar.pictures))
    written = dict(_write_records(material, names, folder, tars))
    return PackReport(
        str(folder),
        len(pictures),
        sum(not picture.problem for picture in material.pictures.values()),
        sum(sizes.values()),
        tuple(sizes),
        len(kept),
        {name: number for name, (number, _) in written.items()},
        {name: left_out for name, (_, left_out) in written.items()},
    )


def refuse_unusable(material: Material, skip_missing: bool) -> None:
    """Make sure that every image can be packed; with `skip_missing`, that each file has a record left.

    Raises:
        ImageError: names the first few images that can not, with the records that ask for them.
    """
    left = [any(_is_whole(record, material) for record in file.records) for file in material.files]
    if skip_missing and all(left):
        return
    places: dict[Path, str] = {}
    for file in material.files:
        for record in file.records:
            for image in record.images:
                if material.pictures[image].problem:
                    places.setdefault(image, file.place(record))
    if not places:
        return
    named = [f"  {material.pictures[image].problem} ({place})" for image, place in list(places.items())[:NUM_NAMED]]
    more = [f"  and {len(places) - NUM_NAMED:,} more"] if len(places) > NUM_NAMED else []
    raise ImageError(
        "\n".join([f"{len(places):,} of {count(len(material.pictures), 'image')} can not be packed:", *named, *more])
        + "\nName their folder with --image-root"
        + (", or leave their records out with --skip-missing." if all(left) else "; a file would have no records left.")
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """What the records files are called in the pack."""
    names = [f"{path.stem}.jsonl" for path in paths]
    for number, name in enumerate(names):
        if name in names[:number]:
            other = paths[names.index(name)]
            raise UsageError(f"{paths[number]} would be written as {name}, as would {other}; rename it")
    return names


def _questions(material: Material) -> dict[str, bytes]:
    """For each image its questions and answers by records file, as JSON."""
    found: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for file, name in zip(material.files, _names([file.path for file in material.files]), strict=True):
        for record in file.records:
            for key in dict.fromkeys(material.identity(image) for image in record.images):
                found[key][name] += [{"question": turn.question, "answer": turn.answer} for turn in record.turns]
    return {key: json.dumps(value, ensure_ascii=False).encode() for key, value in found.items()}


def _index(tars: Iterable[Tar], material: Material, image_root: Path | None, questions: Mapping[str, bytes]) -> str:
    """images.ndjson: where each image is, and which files it was; the sha256 of its questions if they lie beside it."""
    files: dict[str, set[str]] = defaultdict(set)
    for file in material.files:
        root = (image_root or file.path.parent).absolute()
        for image in {image for record in file.records for image in record.images}:
            files[material.identity(image)].add(os.path.relpath(image, root))
    lines = (
        {
            "image": tar.member(picture),
            "files": sorted(files[picture.key]),
            "bytes": picture.num_bytes,
            "width": picture.size and picture.size[0],
            "height": picture.size and picture.size[1],
        }
        | ({"questions": bytes_key(questions[picture.key])} if questions else {})
        for tar in tars
        for picture in tar.pictures
    )
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _claim(folder: Path, index: str) -> None:
    """Make the folder and its images.ndjson, or find that it holds the same.

    Raises:
        UsageError: it holds something else.
    """
    place = folder / INDEX
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder to write to")
    if place.exists():
        if place.read_text(encoding="utf-8") != index:
            raise UsageError(
                f"{folder} holds a pack of other images, in tars of another size or with other questions in them; "
                "name another folder"
            )
        return
    others = [path.name for path in folder.iterdir() if TEMPORARY_MARK not in path.name] if folder.exists() else []
    if others:
        raise UsageError(f"{folder} is not empty ({sorted(others)[0]}) and holds no pack; name another folder")
    write_text(place, index)


def _is_there(path: Path, num_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == num_bytes


def _check_room(folder: Path, num_bytes: int) -> None:
    absolute = folder.absolute()
    free = shutil.disk_usage(next(place for place in (absolute, *absolute.parents) if place.exists())).free
    needed = int(num_bytes * MARGIN)
    if num_bytes and free < needed:
        raise DiskFull(
            f"no room for the tars in {folder}: they need {size(needed)}, {size(free)} are free, "
            f"{size(needed - free)} are missing; name a folder on another disk"
        )


def _write_records(
    material: Material, names: Sequence[str], folder: Path, tars: Iterable[Tar]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Write each records file; its name, how many records it has and how many were left out."""
    place_of = {picture.key: folder.absolute() / tar.member(picture) for tar in tars for picture in tar.pictures}
    for file, name in zip(material.files, names, strict=True):
        packed = [
            replace(record, images=tuple(place_of[material.identity(image)] for image in record.images))
            for record in file.records
            if _is_whole(record, material)
        ]
        _write_once(folder / name, packed)
        yield name, (len(packed), len(file.records) - len(packed))


def _write_once(path: Path, records: Sequence[Record]) -> None:
    """Write a records file, unless it is there already.

    Raises:
        UsageError: it is, with other records.
    """
    temporary = temporary_name(path)
    try:
        write_records(temporary, records)
        if path.exists() and path.read_bytes() != temporary.read_bytes():
            raise UsageError(f"{path} holds other records; move it away if it may be written anew")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_whole(record: Record, material: Material) -> bool:
    return not any(material.pictures[image].problem for image in record.images)
