"""An image file as the tower's input, just as the stock processor makes it.

Design: transformers' own Qwen2VLImageProcessor does the resizing and patching; nothing of it is written again here.
Its two backends (PIL and torchvision) resize slightly differently, so which one it is belongs to the fingerprint. PIL
is the default: it is the same on every machine and needs no torchvision. Files are opened as transformers' `load_image`
does: EXIF rotation applied, then converted to RGB.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cache.names import Backend
from lookonce.datasets.images import read_bytes
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

UNDECODABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What Pillow raises for files that are no images, or broken ones."""


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

    def num_tokens(self, width: int, height: int) -> int:
        """How many visual tokens an image of this size becomes."""
        num_patches: int = self._stock.get_number_of_image_patches(height, width)
        return num_patches // int(self._stock.merge_size) ** 2


def decode(data: bytes, path: Path) -> Image.Image:
    """The image in the bytes of a file: EXIF rotation applied, converted to RGB; `path` is for the message.

    Raises:
        BadImage: they are no image, cut short, or too large to be an honest one.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise BadImage(f"can not decode image {path}: it is of no known image format") from None
    except (*UNDECODABLE, MemoryError) as error:
        raise BadImage(f"can not decode image {path}: {error}") from None


def read_size(path: Path) -> tuple[int, int] | None:
    """Width and height from the file's header, or None if it is no image."""
    try:
        with Image.open(path) as image:
            return image.size
    except UNDECODABLE:
        return None


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
