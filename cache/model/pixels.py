"""An image file as the tower's input, just as the stock processor makes it.

Design: transformers' own Qwen2VLImageProcessor decodes, resizes and knows its constants. What follows resizing, turning
8-bit pixels into normalised patches, is left to the device the tower is on (`Patcher`): a quarter of the bytes go there
and no float arithmetic is done on the CPU. Normalising a pixel depends on its channel and its 256 possible values only,
so it is a table, filled by the stock processor itself: the same bits on every device.
The processor's two backends (PIL and torchvision) resize slightly differently, so which one it is belongs to the
fingerprint. PIL is the default: it is the same on every machine and needs no torchvision. Files are opened as
transformers' `load_image` does: EXIF rotation applied, then converted to RGB.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from lookonce.cache.constants import Backend
from lookonce.datasets.images import UNDECODABLE, read_bytes
from lookonce.errors import BadImage, ModelError

SETTINGS = (
    "do_resize",
    "resample",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
    "do_convert_rgb",
    "patch_size",
    "temporal_patch_size",
    "merge_size",
)
"""Of the stock processor, besides its pixel limits: all that changes patches."""


class ImageProcessor:
    """Turns image files into patches; `settings` is all that decides how."""

    def __init__(
        self, folder: Path, backend: Backend = "pil", min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        """Load the settings of a model folder; `min_pixels` and `max_pixels` replace the folder's own.

        Raises:
            ModelError: the folder has no image processor, or torchvision is wanted and missing.
        """
        self.backend = backend
        self._stock = _load(folder, backend, min_pixels, max_pixels)

    @property
    def settings(self) -> dict[str, Any]:
        """As resolved, in plain types: what goes into the fingerprint."""
        values = {name: getattr(self._stock, name) for name in SETTINGS}
        values["resample"] = int(values["resample"])
        for name in ("image_mean", "image_std"):
            values[name] = [float(value) for value in values[name]]
        pixels = {
            "min_pixels": int(self._stock.size["shortest_edge"]),
            "max_pixels": int(self._stock.size["longest_edge"]),
        }
        return {"backend": self.backend, "exif_rotation": "applied", **pixels, **values}

    @property
    def stock(self) -> Any:
        """transformers' own image processor."""
        return self._stock

    def __call__(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """The patches of one RGB image, float32 `[grid_t * grid_h * grid_w, patch_dim]`, and its grid (t, h, w)."""
        output = self._stock(images=[image], return_tensors="pt")
        grid_t, grid_h, grid_w = output["image_grid_thw"][0].tolist()
        return output["pixel_values"], (grid_t, grid_h, grid_w)

    def patches(self, image: Image.Image, path: Path) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """As calling it; `path` is for the message.

        Raises:
            BadImage: its shape is not one the processor takes.
        """
        try:
            return self(image)
        except ValueError as error:
            raise BadImage(f"{path}: {error}") from None

    def read(self, path: Path) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """The patches and the grid of an image file.

        Raises:
            ImageError: it can not be read or decoded, or its shape is not one the processor takes.
        """
        return self.patches(decode(read_bytes(path), path), path)

    def resized(self, image: Image.Image, path: Path) -> torch.Tensor:
        """An RGB image in the size the tower takes, uint8 `[height, width, 3]`; `path` is for the message.

        Raises:
            BadImage: its shape is not one the processor takes.
        """
        factor = self._stock.patch_size * self._stock.merge_size
        if not self._stock.do_resize and (image.width % factor or image.height % factor):
            raise BadImage(f"{path}: {image.width} x {image.height} pixels are no multiples of {factor}")
        try:
            return self._resize_by_pil(image) if self.backend == "pil" else self._resize_by_torchvision(image)
        except ValueError as error:
            raise BadImage(f"{path}: {error}") from None

    def _resize_by_pil(self, image: Image.Image) -> torch.Tensor:
        """What the stock processor comes to after copying the image into arrays and out of them four times, which no
        other thread can do meanwhile."""
        if self._stock.do_resize:
            limits, factor = self._stock.size, self._stock.patch_size * self._stock.merge_size
            height, width = smart_resize(
                image.height, image.width, factor, limits["shortest_edge"], limits["longest_edge"]
            )
            image = image.resize((width, height), resample=self._stock.resample)
        return torch.from_numpy(np.array(image))

    def _resize_by_torchvision(self, image: Image.Image) -> torch.Tensor:
        stock = self._stock
        batch = torch.from_numpy(np.array(image)).permute(2, 0, 1).unsqueeze(0).contiguous()
        if stock.do_resize:
            factor = stock.patch_size * stock.merge_size
            batch = stock.resize(batch, size=stock.size, resample=stock.resample, factor=factor)
        return batch[0].permute(1, 2, 0).contiguous()

    def resized_file(self, path: Path) -> torch.Tensor:
        """As `resized`, of an image file.

        Raises:
            ImageError: it can not be read or decoded, or its shape is not one the processor takes.
        """
        return self.resized(decode(read_bytes(path), path), path)

    def patcher(self) -> Patcher:
        """What makes patches of `resized` images."""
        stock = self._stock
        cutter = Patcher(torch.empty(3, 256), stock.patch_size, stock.merge_size, stock.temporal_patch_size)
        factor = cutter.patch_size * cutter.merge_size
        side = factor * -(-16 // factor)  # so many pixels that every value is there
        ramp = (np.arange(side * side) % 256).astype(np.uint8).reshape(side, side, 1).repeat(3, axis=2)
        patches = stock(images=[Image.fromarray(ramp)], do_resize=False, return_tensors="pt")["pixel_values"]
        values = cutter.cut(torch.from_numpy(ramp)).long()
        channels = torch.arange(3).repeat_interleave(values.shape[1] // 3).expand_as(values)
        cutter.table[channels, values] = patches
        return cutter

    def num_tokens(self, width: int, height: int) -> int:
        """How many visual tokens an image of this size becomes."""
        num_patches: int = self._stock.get_number_of_image_patches(height, width)
        return num_patches // int(self._stock.merge_size) ** 2


class Patcher:
    """Cuts 8-bit images into normalised patches, on any device."""

    def __init__(self, table: torch.Tensor, patch_size: int, merge_size: int, temporal_patch_size: int) -> None:
        """`table` is float32 `[3, 256]`: what the stock processor makes of each value of each channel."""
        self.table = table
        self.patch_size, self.merge_size, self.temporal_patch_size = patch_size, merge_size, temporal_patch_size

    def to(self, device: torch.device, dtype: torch.dtype) -> Patcher:
        table = self.table.to(device, dtype)
        return Patcher(table, self.patch_size, self.merge_size, self.temporal_patch_size)

    def grid_thw(self, image: torch.Tensor) -> tuple[int, int, int]:
        """The grid of an image `[height, width, 3]`: frames, rows and columns of patches."""
        return 1, image.shape[0] // self.patch_size, image.shape[1] // self.patch_size

    def __call__(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """The patches of some images, uint8 `[height, width, 3]`, one image after the other.

        `[num_patches, patch_dim]` in the table's dtype.
        """
        cut = torch.cat([self.cut(image) for image in images])
        channel = torch.arange(3, device=cut.device, dtype=torch.int32).view(1, 3, 1)
        values = cut.view(len(cut), 3, -1).int() + 256 * channel
        return self.table.flatten()[values].view(cut.shape)

    def cut(self, image: torch.Tensor) -> torch.Tensor:
        """The 8-bit patches, in the stock processor's order: merged blocks by rows, then patches in a block."""
        _, rows, columns = self.grid_thw(image)
        patch, merge = self.patch_size, self.merge_size
        blocks = image.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        ordered = blocks.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
        frames = ordered.expand(-1, -1, -1, -1, -1, self.temporal_patch_size, -1, -1)
        return frames.reshape(rows * columns, -1)


def decode(data: bytes, path: Path) -> Image.Image:
    """The image in the bytes of a file: EXIF rotation applied, converted to RGB; `path` is for the message.

    Raises:
        BadImage: they are no image, cut short, or too large to be an honest one.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            rgb = ImageOps.exif_transpose(image).convert("RGB")
            # The mark of a transparent colour outlives the conversion; some versions of transformers paint that colour
            # white and others do not, and a cache must not depend on which.
            rgb.info.pop("transparency", None)
            return rgb
    except UnidentifiedImageError:
        raise BadImage(f"can not decode image {path}: it is of no known image format") from None
    except (*UNDECODABLE, MemoryError) as error:
        raise BadImage(f"can not decode image {path}: {error}") from None


def _load(folder: Path, backend: Backend, min_pixels: int | None, max_pixels: int | None) -> Any:
    processor_class: Any = Qwen2VLImageProcessorPil if backend == "pil" else _torchvision_class()
    try:
        stock = processor_class.from_pretrained(folder)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{folder} has no image processor settings (preprocessor_config.json): {reason}") from None
    size = {"shortest_edge": stock.size["shortest_edge"], "longest_edge": stock.size["longest_edge"]}
    if None in size.values():
        raise ModelError(
            f"{folder / 'preprocessor_config.json'} has no limits shortest_edge and longest_edge in `size`"
        )
    low, high = min_pixels or size["shortest_edge"], max_pixels or size["longest_edge"]
    if low > high:
        raise ModelError(f"cache.min_pixels {low} is more than cache.max_pixels {high}")
    stock.size = type(stock.size)(shortest_edge=low, longest_edge=high)
    return stock


def _torchvision_class() -> Any:
    try:
        import torchvision  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
    except ImportError:
        raise ModelError("`cache.backend: torchvision` needs torchvision, which is not installed; use `pil`") from None
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor
