"""Any file below an image root is encoded as the stock processor sees it, or reported with the reason and retried."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.rows import png_claiming
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cache.build.encode import MAX_UNREAD
from lookonce.cache.store.metadata import read_receipts
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import UNDECODABLE, ImageIndex
from lookonce.errors import FeaturesMissing, ImageError

STOCK_PIXELS = pytest.mark.guarantee(
    "An image file of any format and mode gets the pixels that the stock processor gives for its path, or "
    "is quarantined with its reason; it never stops a build."
)

# On palettes with several transparent colours, and on formats that Pillow will drop.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::DeprecationWarning:PIL")

WIDTH, HEIGHT = 120, 88
ORIENTATION = 0x0112
PAINTS_NO_COLOUR = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)
Write = Callable[[Path], Any]


def noise(size: tuple[int, int] = (WIDTH, HEIGHT), seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def save(image: Image.Image, kind: str, **options: Any) -> Write:
    return lambda path: image.save(path, kind, **options)


def damaged(kind: str, damage: Callable[[bytearray], object]) -> Write:
    def write(path: Path) -> None:
        file = io.BytesIO()
        noise().save(file, kind)
        content = bytearray(file.getvalue())
        damage(content)
        path.write_bytes(content)

    return write


def cut(content: bytearray) -> None:
    del content[len(content) // 2 :]


def leave(num_bytes: int) -> Callable[[bytearray], None]:
    return lambda content: content.__delitem__(slice(num_bytes, None))


def overwrite(byte: int, where: float = 0.5) -> Callable[[bytearray], None]:
    def damage(content: bytearray) -> None:
        begin = int(where * len(content))
        content[begin : begin + 200] = bytes([byte]) * 200

    return damage


def begin_again(content: bytearray) -> None:
    """Write a marker that is allowed only at the beginning."""
    middle = len(content) // 2
    content[middle : middle + 200] = b"\xff\xd8" * 100


def rotated(orientation: int) -> Write:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return save(noise(seed=orientation), "JPEG", exif=exif)


MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBX", "RGBA", "RGBa", "CMYK", "YCbCr", "LAB", "HSV", "I", "F")
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
NOTES: dict[str, dict[str, Any]] = {
    "": {},
    "-index": {"transparency": 7},
    "-alphas": {"transparency": bytes(range(256))},
    "-colour": {"transparency": (9, 9, 9)},
}
"""How a file can say which of its pixels are transparent, besides an alpha channel."""
NOTED = ("GIF", "PNG")
"""The formats whose files keep such notes."""
LEFT_OUT = ("BUFR", "EPS", "GRIB", "HDF5", "ICNS", "PDF", "WMF")
"""What Pillow writes as programs and documents, or with another program; and Apple's icons, which are slow PNGs."""


def of_mode(mode: str) -> Image.Image:
    """An image of any mode in which each colour of the notes above fills a quarter."""
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
    pixels[: HEIGHT // 2, : WIDTH // 2, :3], pixels[HEIGHT // 2 :, : WIDTH // 2, :3] = 7, 9
    if mode in DEEP_MODES:
        pixels[::2, :, 1] = 0  # in little-endian numbers, below 256 in half of the rows
        return Image.fromarray(pixels[..., :2].copy().view("<u2")[..., 0]).convert("I").convert(mode)
    rgba = Image.fromarray(pixels, "RGBA")
    if mode == "LAB":
        return Image.frombytes("LAB", rgba.size, rgba.convert("RGB").tobytes())
    through = {"La": "LA", "LA": "RGBA", "PA": "P", "RGBA": "RGBA", "RGBa": "RGBA"}.get(mode, "RGB")
    return rgba.convert("RGB").convert("P").convert(mode) if through == "P" else rgba.convert(through).convert(mode)


def written_modes() -> dict[str, bytes]:
    """A file of each mode in each format that Pillow writes and reads, with each note of transparency that it keeps."""
    Image.init()
    found: dict[str, bytes] = {}
    for kind, mode, (name, note) in itertools.product(sorted(Image.SAVE), MODES + DEEP_MODES, NOTES.items()):
        if kind in LEFT_OUT or (note and kind not in NOTED):
            continue
        file = io.BytesIO()
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(*UNDECODABLE, AttributeError):
            of_mode(mode).save(file, kind, **note)
            with Image.open(file) as image:
                if not note or image.info.get("transparency") is not None:
                    image.convert("RGB")
                    found[f"{mode.replace(';', '-')}{name}.{kind.lower()}"] = file.getvalue()
    return found


MORE = [noise(seed=seed) for seed in (1, 2)]
ENCODED: dict[str, Write] = {
    "progressive.jpg": save(noise(), "JPEG", progressive=True),
    **{f"exif-{number}.jpg": rotated(number) for number in range(1, 9)},
    "exif-nonsense.jpg": rotated(77),
    "animated.gif": save(noise(seed=3), "GIF", save_all=True, append_images=MORE),
    "animated.webp": save(noise(seed=4), "WEBP", save_all=True, append_images=MORE),
    "pages.tif": save(noise(seed=5), "TIFF", save_all=True, append_images=MORE),
    "stereo.mpo": save(noise(seed=6), "MPO", save_all=True, append_images=MORE),
    "lies.png": save(noise(seed=7), "JPEG"),
    "no suffix": save(noise(seed=8), "JPEG"),
    "größe 内視鏡.jpg": save(noise(seed=9), "JPEG"),
    "scratched.jpg": damaged("JPEG", overwrite(0x00)),  # Pillow ignores it, and so do we
    "1x1.png": save(noise(size=(1, 1)), "PNG"),
    "2000x11.png": save(noise(size=(2000, 11)), "PNG"),
    **{name: functools.partial(Path.write_bytes, data=data) for name, data in written_modes().items()},
}
NO_IMAGE = "unknown image format"
QUARANTINED: dict[str, tuple[Write, str]] = {
    "truncated.jpg": (damaged("JPEG", cut), "cannot decode image {path}: image file is truncated"),
    "truncated.png": (damaged("PNG", cut), "cannot decode image {path}: image file is truncated"),
    "corrupt.jpg": (damaged("JPEG", begin_again), "cannot decode image {path}: broken data stream"),
    "headless.jpg": (damaged("JPEG", overwrite(0x00, 0)), f"cannot decode image {{path}}: {NO_IMAGE}"),
    "corrupt.png": (damaged("PNG", overwrite(0xFF)), "cannot decode image {path}: unrecognized data stream"),
    "header alone.jpg": (damaged("JPEG", leave(20)), "cannot decode image {path}: "),
    "signature alone.png": (damaged("PNG", leave(8)), "cannot decode image {path}: "),
    "empty.jpg": (lambda path: path.write_bytes(b""), f"cannot decode image {{path}}: {NO_IMAGE}"),
    "text.jpg": (lambda path: path.write_text("no image"), f"cannot decode image {{path}}: {NO_IMAGE}"),
    "10000x10.png": (save(noise(size=(10_000, 10)), "PNG"), "{path}: absolute aspect ratio must be smaller than 200"),
    "bomb.png": (
        lambda path: path.write_bytes(png_claiming(100_000, 100_000)),
        "cannot decode image {path}: Image size (10000000000 pixels) exceeds limit",
    ),
    "white.png": (save(Image.new("RGB", (64, 64), "white"), "PNG"), "the tower's features of {path} are not finite"),
}
UNREADABLE: dict[str, tuple[Write, str]] = {
    "absent.jpg": (lambda path: None, "No such file or directory"),
    "../outside.jpg": (save(noise(), "JPEG"), "it leads out of the image root"),
    "loop.jpg": (lambda path: path.symlink_to("loop.jpg"), "Too many levels of symbolic links"),
    "fifo.jpg": (os.mkfifo, "it is a FIFO or a device; expected a file"),
    "below a file.jpg/a.jpg": (lambda path: path.parent.write_text("a"), "Not a directory"),
}


class World:
    """All these files below one image root, and the cache that is built from it once."""

    def __init__(self, site: Any) -> None:
        self.root, self.processor = site.path / "images", site.processor
        self.root.mkdir()
        writers = ENCODED | {name: write for name, (write, _) in (QUARANTINED | UNREADABLE).items()}
        for name, write in writers.items():
            write(self.root / name)
        self.paths = {name: self.root / name for name in writers}
        self.images: ImageIndex = site.index(*self.paths.values())
        self.report = site.build(self.images, shard_bytes=10**7)
        self.cache = VisionCache.open(self.report.folder)
        self.lines = {line["file"]: line for line in site.quarantine()}

    def key(self, name: str) -> str:
        return self.images.key_of[self.paths[name]]


@pytest.fixture(scope="module")
def world(make_site: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(make_site(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def stock(sample: Path) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil.from_pretrained(sample / "model")


@STOCK_PIXELS
@pytest.mark.parametrize("name", ENCODED)
def test_the_tower_gets_the_patches_of_the_stock_processor_bit_for_bit(
    world: World, stock: Qwen2VLImageProcessorPil, name: str
) -> None:
    with Image.open(world.paths[name]) as image:
        loaded = load_image(image)  # what the stock processor does with a path; it would leave the file open
    if PAINTS_NO_COLOUR and loaded.info.get("transparency") is not None:
        pytest.skip("transformers before 5.21 does not paint a transparent colour white")
    expected = stock(images=[loaded], return_tensors="pt")
    cached = world.cache[world.key(name)]  # the fake tower's features are the patches themselves
    seen = cached.reshape(-1, cached.shape[-1]), world.cache.grid_thw(world.key(name))
    for patches, grid in (seen, world.processor.read(world.paths[name])):
        assert torch.equal(patches, expected["pixel_values"])
        assert list(grid) == expected["image_grid_thw"][0].tolist()


@STOCK_PIXELS
@pytest.mark.parametrize("name", QUARANTINED)
def test_a_file_that_is_not_a_valid_image_is_quarantined_with_the_reason(world: World, name: str) -> None:
    path, key = world.paths[name], world.key(name)
    failure = world.cache.failed[key]
    reason = failure.reason
    assert (failure.file, failure.retry) == (str(path), False)
    assert reason.startswith(QUARANTINED[name][1].format(path=path))
    assert world.report.quarantined[key] == reason
    assert world.lines[str(path)] == {"key": key, "file": str(path), "reason": reason}
    with pytest.raises(FeaturesMissing, match=f"{key}.*quarantined: {re.escape(reason)}"):
        world.cache[key]
    if not reason.endswith("not finite"):
        with pytest.raises(ImageError, match=f"^{re.escape(QUARANTINED[name][1].format(path=path))}"):
            world.processor.read(path)


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_file_is_reported_with_the_reason(world: World, name: str) -> None:
    path = world.paths[name]
    expected = f"cannot read image {path}: {UNREADABLE[name][1]}"
    assert world.images.unusable[path].startswith(expected)
    assert world.report.quarantined[str(path)] == world.images.unusable[path]
    assert world.lines[str(path)] == {"key": None, "file": str(path), "reason": world.images.unusable[path]}


@STOCK_PIXELS
def test_all_other_images_are_encoded(world: World) -> None:
    assert set(world.cache.keys()) == {world.key(name) for name in ENCODED}
    assert len(world.report.quarantined) == len(world.lines) == len(QUARANTINED) + len(UNREADABLE)
    assert world.report.num_encoded == len({world.key(name) for name in ENCODED})
    assert world.report.num_missing == 0
    text = world.report.text()
    assert f"{len(world.lines)} images could not be encoded (see " in text and "complete" in text


def test_a_build_encodes_transparent_colours_again_that_version_0_2_has_not_painted(
    make_site: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path)
    paths = [site.noise("plain.png", 1), site.noise("opaque.gif", 2), tmp_path / "images.png"]
    of_mode("L").save(paths[2], transparency=7)
    with monkeypatch.context() as before:  # as in version 0.2
        before.setattr("lookonce.cache.model.pixels.on_white", lambda image: image)
        before.setattr("lookonce.datasets.images._traits", lambda image: ())
        site.build(site.index(*paths))
    old, key = site.stored(), site.index(paths[2]).key_of[paths[2]]
    report = site.build(site.index(*paths))
    assert report.num_encoded == 1 and report.num_missing == 0
    assert {changed for changed, features in site.stored().items() if features != old[changed]} == {key}
    assert site.build(site.index(*paths), site.no_tower).num_encoded == 0
    assert site.build(site.index(*paths), root="new").num_encoded == 3 and site.stored("new") == site.stored()


NUM_IMAGES = 8


def test_only_images_with_features_that_are_not_finite_are_quarantined_of_a_tower_batch(site, images):
    white = site.path / "white.png"
    Image.new("RGB", (64, 64), "white").save(white)  # the fake tower gives NaN
    tower = site.Tower()
    tower.tokens_per_tower_batch = 10**6
    more = site.index(*images.key_of, white)
    report = site.build(more, tower, shard_bytes=10**9)
    assert report.quarantined == {more.key_of[white]: f"the tower's features of {white} are not finite"}
    site.build(images, root="undisturbed", shard_bytes=10**9)
    assert site.stored() == site.stored("undisturbed")


def test_a_bad_image_is_retried_on_request(site, images):
    (site.path / "bad.jpg").write_text("no image")
    more = site.index(*images.key_of, site.path / "bad.jpg")
    before = site.build(more)
    kept = site.stamps()
    after = site.build(more, retry_quarantined=True)
    assert after.quarantined == before.quarantined
    assert (after.num_encoded, after.num_reused) == (0, NUM_IMAGES)
    assert after.num_shards == before.num_shards + 1
    assert site.stamps().items() >= kept.items()
    assert len(site.quarantine()) == 1


# Files that cannot be read: another build may find them.


def lose(path):
    path.unlink()
    return f"cannot read image {path}: No such file or directory"


def change(path):
    path.write_bytes(path.read_bytes() + b" ")
    return f"image {path} has changed since it was hashed"


@pytest.mark.parametrize("harm", [lose, change])
def test_an_image_that_was_lost_or_changed_meanwhile_is_reported_and_retried(site, images, harm):
    [path, *_] = images.path_of.values()
    content = path.read_bytes()
    key = images.key_of[path]
    reason = harm(path)
    report = site.build(images)
    assert (report.num_encoded, report.quarantined) == (NUM_IMAGES - 1, {key: reason})
    [failed] = [receipt.failed for receipt in read_receipts(site.folder()) if receipt.failed]
    assert failed[key].retry
    assert site.quarantine() == [{"key": key, "file": str(path), "reason": reason}]

    path.write_bytes(content)
    again = site.build(images)
    assert (again.num_encoded, again.num_reused, again.quarantined) == (1, NUM_IMAGES - 1, {})
    assert site.stored().keys() == images.path_of.keys()
    assert site.quarantine() == []
    site.build(images, site.no_tower)


@pytest.mark.parametrize("tokens_per_tower_batch", [1, 20, 10**6])
def test_a_lost_disk_stops_the_build_instead_of_quarantining_all_images(site, tokens_per_tower_batch):
    paths = [site.noise(f"{number}.png", number, (64, 64)) for number in range(3 * MAX_UNREAD)]
    images, tower = site.index(*paths), site.Tower()
    tower.tokens_per_tower_batch = tokens_per_tower_batch
    content = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.unlink()
    with pytest.raises(ImageError, match=r"most images of shard-00000 cannot be read; the last one: .*\.png"):
        site.build(images, tower, shard_bytes=10**9)
    assert not site.stored() and not site.leftovers()
    for path in paths:
        path.write_bytes(content[path])
    assert site.build(images, tower, shard_bytes=10**9).num_encoded == len(paths)
