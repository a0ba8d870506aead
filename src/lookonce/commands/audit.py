"""`lookonce data audit|pack`: what is in records, and packing their images. What they do is in `datasets`."""

from __future__ import annotations

from lookonce.commands.data import data  # noqa: F401
