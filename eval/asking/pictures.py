"""Images as they come from Python: their files, or images of Pillow, which are written to files."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageOps

Picture = str | Path | Image.Image
"""An image: its file, or the image itself."""
Shown = Picture | tuple[Picture, ...]
"""What a question is about: an image, or several that are shown together."""


class PictureFiles:
    """Writes images of Pillow to files: then they are read, named and encoded like all others.

    They are written as RGB, as transformers reads the file of such an image. PNG notes a transparent colour.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_written = 0

    def path(self, picture: Picture) -> Path:
        if not isinstance(picture, Image.Image):
            return Path(picture)
        self._num_written += 1
        path = self._folder / f"{self._num_written}.png"
        ImageOps.exif_transpose(picture).convert("RGB").save(path, compress_level=0)
        return path
