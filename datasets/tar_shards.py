"""Write images into WebDataset tar shards, and records that point into them: `lookonce data tar`.

    DIR/images-00000.tar     <key>.jpg, ...: each distinct image once, its bytes unchanged, named by its image key
    DIR/images.ndjson        one line per image: where it is, which files it was, its bytes and its size
    DIR/train.jsonl          the records, with images like images-00000.tar/<key>.jpg

Design: images come in the order of `ImageIndex.path_of`, in which a cache is planned, so that a cache shard's images
are contiguous, and a cache built from tar shards has the same shards as one built from the files. Tar shards hold
images only, unless questions are requested, so that correcting a question changes no tar shard; `<key>.json` then
follows the image. Times, owners and modes are fixed, so the same input gives the same bytes. images.ndjson is written
first and defines the content of each tar shard. Tar shards get their names when they are complete, and existing ones
are kept, so that an interrupted run resumes. A killed one leaves a file with `.tmp-` in its name. The cost: every image
is read twice, first for its key and its size.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tarfile import BLOCKSIZE, RECORDSIZE
from typing import Any

from tqdm import tqdm

from lookonce.datasets.audit.corpus import Corpus
from lookonce.datasets.formats.image_references import suffix_of_format
from lookonce.datasets.images import ImageInfo, bytes_key, distinct, read_many
from lookonce.datasets.records import LeftOut, Record, by_kind, errors_name, leave_out, write_records
from lookonce.disk_space import check_room, disk_full
from lookonce.errors import ImageError, RecordsError, UsageError
from lookonce.files import TEMPORARY_MARK, atomic_write, create_text, is_full, temporary_name
from lookonce.text import count, first_few, rows, size

KEPT = "Finished tar shards are kept: make room and run the same command again"


@dataclass(frozen=True)
class TarShard:
    """One tar file and its images."""

    name: str
    images: tuple[ImageInfo, ...]

    def member(self, image: ImageInfo) -> str:
        """The path of an image, below the folder of the tar shards."""
        return f"{self.name}/{image.key}{suffix_of_format(image.format)}"


def plan_tar_shards(images: Iterable[ImageInfo], tar_bytes: int) -> list[TarShard]:
    """Tar shards of at most `tar_bytes` bytes of images, in order; a larger image gets one to itself."""
    shards: list[list[ImageInfo]] = []
    room = 0
    for image in images:
        if not shards or image.num_bytes > room:
            shards.append([])
            room = tar_bytes
        shards[-1].append(image)
        room -= image.num_bytes
    return [TarShard(f"images-{number:05}.tar", tuple(shard)) for number, shard in enumerate(shards)]


def tar_size(shard: TarShard, json_of: Mapping[str, bytes]) -> int:
    """The bytes of a tar file: a header and whole blocks per member, two empty blocks, rounded up to whole records."""
    members = [image.num_bytes for image in shard.images]
    members += [len(json_of[image.key]) for image in shard.images if image.key in json_of]
    return _round_up(sum(BLOCKSIZE + _round_up(number, BLOCKSIZE) for number in members) + 2 * BLOCKSIZE, RECORDSIZE)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def write_tar_shard(
    folder: Path, shard: TarShard, json_of: Mapping[str, bytes], progress: Callable[[], object]
) -> None:
    """Write a tar file; `json_of` has the JSON about images by key, `progress` is called for each image.

    Raises:
        ImageError: an image cannot be read, or has changed.
        DiskFull: there is no room.
    """
    from webdataset import TarWriter  # slow to import

    path = folder / shard.name
    try:
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            with TarWriter(file, user="", group="", mode=0o644, mtime=0, encoder=False) as writer:
                for image, data in _read(shard.images):
                    json = {"json": json_of[image.key]} if image.key in json_of else {}
                    # Loaders choose a decoder by the extension, so it follows the image's format, not its old name.
                    writer.write({"__key__": image.key, suffix_of_format(image.format).removeprefix("."): data} | json)
                    progress()
    except OSError as error:
        if is_full(error):
            raise disk_full(folder, tar_size(shard, json_of), error, str(path), KEPT) from None
        raise


def _read(images: Sequence[ImageInfo]) -> Iterator[tuple[ImageInfo, bytes]]:
    by_path = {image.path: image for image in images}
    for path, data in read_many(by_path):
        if isinstance(data, ImageError):
            raise data
        if bytes_key(data) != by_path[path].key:
            raise ImageError(f"{path} changed while it was written; run the same command with another folder")
        yield by_path[path], data


INDEX = "images.ndjson"  # not .jsonl: `*.jsonl` are the records
NUM_NAMED = 5
"""How many unusable images a message names."""


@dataclass(frozen=True)
class TarReport:
    """What `write_tar_shards` has written."""

    folder: str
    num_images: int
    num_files: int
    """The number of files that the records name, duplicates included."""
    num_bytes: int
    """Bytes of all tar shards."""
    tars: tuple[str, ...]
    num_kept: int
    """Tar shards that existed before."""
    records: Mapping[str, int]
    """Records written, by file."""
    left_out: Mapping[str, int]
    """Records left out because of their images, by file."""
    notes: tuple[str, ...] = ()
    """What else of the files was left out."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        copies = f" ({self.num_files:,} names)" if self.num_files != self.num_images else ""
        kept = f", {self.num_kept:,} of them existed before" if self.num_kept else ""
        lines = [
            ("images", f"{self.num_images:,}{copies}"),
            ("tar shards", f"{len(self.tars):,}, {size(self.num_bytes)}{kept}"),
        ]
        for name, number in self.records.items():
            without = f", {self.left_out[name]:,} left out because of their images" if self.left_out[name] else ""
            lines.append((name, f"{count(number, 'record')}{without}"))
        return "\n".join(["", self.folder, "", rows(lines), *self.notes, ""])


def write_tar_shards(
    paths: Sequence[Path],
    folder: Path,
    image_root: Path | None = None,
    *,
    tar_bytes: int,
    skip_missing: bool = False,
    with_questions: bool = False,
) -> TarReport:
    """Write the images of some records files into tar shards below `folder`, and the records beside them.

    `with_questions` adds a JSON file for each image, with its questions and answers by records file.

    Raises:
        RecordsError: a records file is missing or malformed.
        ImageError: an image is missing, broken (both unless `skip_missing`), or changed while it was written.
        UsageError: the folder holds something else, or two records files have the same name.
        DiskFull: there is no room.
    """
    corpus = Corpus.read(paths, image_root)
    refuse_malformed(corpus)
    names = _names([file.path for file in corpus.files])
    unusable = {path: image.problem for path, image in corpus.images.items() if image.problem}
    usable = {name: leave_out(file.records, unusable) for name, file in zip(names, corpus.files, strict=True)}
    refuse_unusable(list(usable.values()), len(corpus.images), skip_missing)
    images = [image for image in distinct(corpus.images).values() if not image.problem]
    questions = _questions(corpus, names) if with_questions else {}
    shards = plan_tar_shards(images, tar_bytes)
    sizes = {shard.name: tar_size(shard, questions) for shard in shards}
    kept = {path.name for path in folder.glob("*.tar") if path.stat().st_size == sizes.get(path.name)}
    new_bytes = sum(number for name, number in sizes.items() if name not in kept)
    check_room(folder, new_bytes, f"the tar shards in {folder}", "Make room, or name a folder on another disk")
    _write_index(folder, _index(shards, corpus, image_root, questions))
    with tqdm(total=len(images), desc="write images", unit="image", leave=False, disable=None) as progress:
        for shard in shards:
            if shard.name not in kept:
                write_tar_shard(folder, shard, questions, progress.update)
            else:
                progress.update(len(shard.images))
    path_of = {image.key: folder.absolute() / shard.member(image) for shard in shards for image in shard.images}
    for name, (records, _) in usable.items():
        in_tars = [
            replace(record, images=tuple(path_of[corpus.identity(image)] for image in record.images))
            for record in records
        ]
        _write_once(folder / name, in_tars)
    return TarReport(
        str(folder),
        len(images),
        len(corpus.images) - len(unusable),
        sum(sizes.values()),
        tuple(sizes),
        len(kept),
        {name: len(records) for name, (records, _) in usable.items()},
        {name: left_out.num_left_out for name, (_, left_out) in usable.items()},
        tuple(file.note for file in corpus.files if file.note),
    )


def refuse_malformed(corpus: Corpus) -> None:
    """Check that every record could be read.

    Raises:
        RecordsError: names the first few malformed records of each kind.
    """
    kinds = by_kind(one for file in corpus.files for one in file.malformed)
    if kinds:
        number = sum(len(kind.places) for kind in kinds)
        named = first_few([kind.text() for kind in kinds], NUM_NAMED, "other mistake")
        advice = "correct them, or leave them out with: lookonce data clean RECORDS OUT"
        raise RecordsError("\n".join([f"{count(number, 'malformed record')}; {advice}", *named]))


def refuse_unusable(files: Sequence[tuple[list[Record], LeftOut]], num_images: int, skip_missing: bool) -> None:
    """Check that every image is usable; with `skip_missing`, that each file has a record left.

    `files` are the records of each file that are left, and those that are not.

    Raises:
        ImageError: names the first few unusable images with their records.
    """
    left = all(records for records, _ in files)
    unusable = {image.path: image.text() for _, left_out in files for image in left_out.images}
    if not unusable or (skip_missing and left):
        return
    named = first_few(list(unusable.values()), NUM_NAMED)
    raise ImageError(
        "\n".join([f"{len(unusable):,} of {count(num_images, 'image')} cannot be used:", *named])
        + "\nName their folder with --image-root"
        + (", or leave out their records with --skip-missing." if left else "; a file would have no records left.")
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """The names of the new records files."""
    names = [f"{path.stem}.jsonl" for path in paths]
    for path, name in zip(paths, names, strict=True):
        if (other := paths[names.index(name)]) != path:
            raise UsageError(f"{path} would be written as {name}, as would {other}; rename it")
    return names


def _questions(corpus: Corpus, names: Sequence[str]) -> dict[str, bytes]:
    """For each image its questions and answers by records file, as JSON."""
    found: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for file, name in zip(corpus.files, names, strict=True):
        for record in file.records:
            for key in dict.fromkeys(corpus.identity(image) for image in record.images):
                found[key][name] += [{"question": turn.question, "answer": turn.answer} for turn in record.turns]
    return {key: json.dumps(value, ensure_ascii=False).encode() for key, value in found.items()}


def _index(shards: Iterable[TarShard], corpus: Corpus, image_root: Path | None, questions: Mapping[str, bytes]) -> str:
    """images.ndjson: where each image is, and which files it was; the sha256 of its questions if they are written."""
    files: dict[str, set[str]] = defaultdict(set)
    for file in corpus.files:
        root = (image_root or file.path.parent).absolute()
        for image in {image for record in file.records for image in record.images}:
            files[corpus.identity(image)].add(os.path.relpath(image, root))
    lines = (
        {
            "image": shard.member(info),
            "files": sorted(files[info.key]),
            "bytes": info.num_bytes,
            "width": info.size and info.size[0],
            "height": info.size and info.size[1],
        }
        | ({"questions": bytes_key(questions[info.key])} if questions else {})
        for shard in shards
        for info in shard.images
    )
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _write_index(folder: Path, index: str) -> None:
    """Write images.ndjson, or check that the folder has the same one.

    Raises:
        UsageError: the folder holds something else.
    """
    path = folder / INDEX
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder to write to")
    names = [path.name for path in folder.iterdir() if TEMPORARY_MARK not in path.name] if folder.exists() else []
    if names and INDEX not in names:
        raise UsageError(f"{folder} is not empty ({sorted(names)[0]}) and has no {INDEX}; name another folder")
    # Of several processes that write into one folder at once, one creates the index; the others must want the same.
    if not create_text(path, index) and path.read_text(encoding="utf-8") != index:
        raise UsageError(
            f"{folder} holds other tar shards: of other images, of another size or with other questions; "
            "name another folder"
        )


def _write_once(path: Path, records: Sequence[Record]) -> None:
    """Write a records file, unless it exists.

    Raises:
        UsageError: it exists with other records.
    """
    temporary = temporary_name(path)
    try:
        with errors_name(path, temporary):
            write_records(temporary, records)
        os.link(temporary, path)
    except FileExistsError:
        if path.read_bytes() != temporary.read_bytes():
            raise UsageError(f"{path} holds other records; move it away to have it written again") from None
    finally:
        temporary.unlink(missing_ok=True)
