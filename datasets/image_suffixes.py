"""File name suffixes of images, by Pillow's name of the format, by the first bytes, and in the names of files.

Design: bytes that are only stored are recognised by their first bytes, without Pillow, so broken images keep the suffix
that they claim.
"""

from __future__ import annotations

import re

SUFFIXES = ("jpg", "jpeg", "png", "gif", "bmp", "tif", "tiff", "webp")
"""Files with these suffixes are images."""
OF_FORMAT = {"JPEG": ".jpg", "MPO": ".jpg", "JPEG2000": ".jp2", "TIFF": ".tif"}
"""Suffixes of those of Pillow's formats that are not named like the format."""
SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
)
"""The first bytes of image files; WebP's are in two places."""
IMAGE_SUFFIX = re.compile(rf"\.({'|'.join(SUFFIXES)})$", re.IGNORECASE)


def suffix_of_format(format: str) -> str:
    """The suffix for Pillow's name of a format: ".jpg"."""
    return OF_FORMAT.get(format, f".{format.lower()}")


def suffix_of_bytes(data: bytes) -> str:
    """The suffix that the first bytes of a file ask for; empty if they are unknown."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return next((suffix_of_format(format) for signature, format in SIGNATURES if data.startswith(signature)), "")


def without_suffix(name: str) -> str:
    """A file name without its suffix, if that is an image's."""
    return IMAGE_SUFFIX.sub("", name)
