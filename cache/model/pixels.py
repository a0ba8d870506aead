"""From an image file to the tower's input, bit for bit as the stock image processor does it.

Design: the settings and the resizing are those of transformers' Qwen2VLImageProcessor. The step after resizing, 8-bit
pixels to normalised patches, runs on the tower's device (`Patcher`): a quarter of the bytes are copied there and the
CPU does no float arithmetic. A normalised value depends only on the channel and on one of 256 pixel values, so it is
looked up in a table that the stock processor itself has filled: the same bits on every device.

The processor's two backends (PIL and torchvision) resize slightly differently, so the backend is part of the
fingerprint. PIL is the default: it gives the same result on every machine. With either, Pillow decodes the files.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from lookonce.cache.format import Backend, Grid
from lookonce.datasets.images import decode, read_bytes
from lookonce.errors import BadImage, ModelError, explain_os_error
from lookonce.text import first_line

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
"""The settings of the stock processor that change patches, besides its pixel limits."""


class ImageProcessor:
    """Turns image files into patches; `settings` has everything that the result depends on."""

    def __init__(
        self, folder: Path, backend: Backend = "pil", min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        """Load a model folder's settings, with other limits if given; raises ModelError if it has none."""
        self.backend = backend
        self.stock = _load(folder, backend, min_pixels, max_pixels)
        """transformers' own image processor."""

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings in plain types, as they go into the fingerprint."""
        values = {name: getattr(self.stock, name) for name in SETTINGS}
        values["resample"] = int(values["resample"])
        for name in ("image_mean", "image_std"):
            values[name] = [float(value) for value in values[name]]
        pixels = {
            "min_pixels": int(self.stock.size["shortest_edge"]),
            "max_pixels": int(self.stock.size["longest_edge"]),
        }
        return {"backend": self.backend, "exif_rotation": "applied", **pixels, **values}

    def __call__(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
        """The patches of one RGB image, float32 `[grid_t * grid_h * grid_w, patch_dim]`, and its grid (t, h, w)."""
        output = self.stock(images=[self._rgb(image)], return_tensors="pt")
        grid_t, grid_h, grid_w = output["image_grid_thw"][0].tolist()
        return output["pixel_values"], (grid_t, grid_h, grid_w)

    def read(self, path: Path) -> tuple[torch.Tensor, Grid]:
        """The patches and the grid of an image file; raises ImageError if it cannot be read, decoded or resized."""
        image = decode(read_bytes(path), path)
        try:
            return self(image)
        except ValueError as error:
            raise BadImage(f"{path}: {error}") from None

    def resized(self, image: Image.Image, path: Path) -> torch.Tensor:
        """An RGB image resized for the tower, uint8 `[height, width, 3]`; raises BadImage, which names `path`."""
        self.check_size(image.size, path)
        try:
            image = self._rgb(image)
            return self._resize_by_pil(image) if self.backend == "pil" else self._resize_by_torchvision(image)
        except ValueError as error:
            raise BadImage(f"{path}: {error}") from None

    def check_size(self, size: tuple[int, int], path: Path) -> None:
        """Raise BadImage, naming `path`, if the processor does not resize and needs other multiples of pixels."""
        factor = self.stock.patch_size * self.stock.merge_size
        if not self.stock.do_resize and (size[0] % factor or size[1] % factor):
            raise BadImage(f"{path}: {size[0]} x {size[1]} pixels are not multiples of {factor}")

    def resized_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height after resizing; raises ValueError if one side is more than 200 times the other."""
        if not self.stock.do_resize:
            return size
        limits, factor = self.stock.size, self.stock.patch_size * self.stock.merge_size
        height, width = smart_resize(size[1], size[0], factor, limits["shortest_edge"], limits["longest_edge"])
        return width, height

    def _rgb(self, image: Image.Image) -> Image.Image:
        return on_white(image) if self.stock.do_convert_rgb else image

    def _resize_by_pil(self, image: Image.Image) -> torch.Tensor:
        """The stock processor's result, without its four copies into and out of arrays, which hold Python's lock."""
        if self.stock.do_resize:
            image = image.resize(self.resized_size(image.size), resample=self.stock.resample)
        return torch.from_numpy(np.array(image))

    def _resize_by_torchvision(self, image: Image.Image) -> torch.Tensor:
        stock = self.stock
        batch = torch.from_numpy(np.array(image)).permute(2, 0, 1).unsqueeze(0).contiguous()
        if stock.do_resize:
            factor = stock.patch_size * stock.merge_size
            batch = stock.resize(batch, size=stock.size, resample=stock.resample, factor=factor)
        return batch[0].permute(1, 2, 0).contiguous()

    def patcher(self) -> Patcher:
        """The `Patcher` for the images that `resized` returns."""
        stock = self.stock
        cutter = Patcher(torch.empty(3, 256), stock.patch_size, stock.merge_size, stock.temporal_patch_size)
        factor = cutter.patch_size * cutter.merge_size
        side = factor * -(-16 // factor)  # at least 256 pixels, so that every value occurs
        ramp = (np.arange(side * side) % 256).astype(np.uint8).reshape(side, side, 1).repeat(3, axis=2)
        patches = stock(images=[Image.fromarray(ramp)], do_resize=False, return_tensors="pt")["pixel_values"]
        values = cutter.cut(torch.from_numpy(ramp)).long()
        channels = torch.arange(3).repeat_interleave(values.shape[1] // 3).expand_as(values)
        cutter.table[channels, values] = patches
        return cutter

    def num_tokens(self, width: int, height: int) -> int:
        num_patches: int = self.stock.get_number_of_image_patches(height, width)
        return num_patches // int(self.stock.merge_size) ** 2


class Patcher:
    """Splits 8-bit images into normalised patches, on any device."""

    def __init__(self, table: torch.Tensor, patch_size: int, merge_size: int, temporal_patch_size: int) -> None:
        """`table` is float32 `[3, 256]`: the normalised value of each pixel value in each channel."""
        self.table = table
        self.patch_size, self.merge_size, self.temporal_patch_size = patch_size, merge_size, temporal_patch_size

    def to(self, device: torch.device, dtype: torch.dtype) -> Patcher:
        table = self.table.to(device, dtype)
        return Patcher(table, self.patch_size, self.merge_size, self.temporal_patch_size)

    def grid_thw(self, image: torch.Tensor) -> Grid:
        """The grid of an image `[height, width, 3]`: frames, rows and columns of patches."""
        return 1, image.shape[0] // self.patch_size, image.shape[1] // self.patch_size

    def __call__(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """The patches of images uint8 `[height, width, 3]`, image after image.

        The result is `[num_patches, patch_dim]` in the table's dtype.
        """
        cut = torch.cat([self.cut(image) for image in images])
        channel = torch.arange(3, device=cut.device, dtype=torch.int32).view(1, 3, 1)
        values = cut.view(len(cut), 3, -1).int() + 256 * channel
        return self.table.flatten()[values].view(cut.shape)

    def cut(self, image: torch.Tensor) -> torch.Tensor:
        """The 8-bit patches in the stock processor's order: merged blocks row by row, then the patches of a block."""
        _, rows, columns = self.grid_thw(image)
        patch, merge = self.patch_size, self.merge_size
        blocks = image.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        ordered = blocks.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
        frames = ordered.expand(-1, -1, -1, -1, -1, self.temporal_patch_size, -1, -1)
        return frames.reshape(rows * columns, -1)


def on_white(image: Image.Image) -> Image.Image:
    """An RGB image with the colour that its file marks as transparent, if there is one, painted white.

    transformers does so from 5.21 on, and earlier versions do not; a cache must not depend on the version.
    """
    if image.info.get("transparency") is None:
        return image
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _load(folder: Path, backend: Backend, min_pixels: int | None, max_pixels: int | None) -> Any:
    processor_class: Any = Qwen2VLImageProcessorPil
    if backend == "torchvision":
        if importlib.util.find_spec("torchvision") is None:
            raise ModelError("`cache.backend: torchvision` needs torchvision, which is not installed; use `pil`")
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as processor_class
    try:
        stock = processor_class.from_pretrained(folder)
    except PermissionError as error:
        raise ModelError(explain_os_error(error)) from None
    except OSError as error:
        reason = first_line(error)
        raise ModelError(f"{folder} has no image processor settings (preprocessor_config.json): {reason}") from None
    size = {"shortest_edge": stock.size["shortest_edge"], "longest_edge": stock.size["longest_edge"]}
    if None in size.values():
        raise ModelError(
            f"{folder / 'preprocessor_config.json'} has no limits shortest_edge and longest_edge in `size`"
        )
    low, high = min_pixels or size["shortest_edge"], max_pixels or size["longest_edge"]
    if low > high:
        of_model = f"in {folder / 'preprocessor_config.json'}"
        least = f"cache.min_pixels {low}" if min_pixels else f"size.shortest_edge {low} {of_model}"
        most = f"cache.max_pixels {high}" if max_pixels else f"size.longest_edge {high} {of_model}"
        raise ModelError(f"{least} is more than {most}; lower cache.min_pixels or raise cache.max_pixels")
    stock.size = type(stock.size)(shortest_edge=low, longest_edge=high)
    return stock
