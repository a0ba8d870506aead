"""The model that a run starts from, and the fingerprint of its cache: recorded before, or computed now.

Design: the model is located once and passed on as a folder, because a branch on the Hub may move in between, and the
fingerprint of one commit must not be recorded for another. Opening depends only on what the record distinguishes, so no
other setting can change the fingerprint. Torch is imported only where the model is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.fingerprint_notes import Source
from lookonce.hub import locate
from lookonce.run.config import RunFile

if TYPE_CHECKING:
    from lookonce.cache.model.model_folder import ModelFolder
    from lookonce.cache.model.pixels import ImageProcessor

PIXEL_SETTINGS = {"backend", "min_pixels", "max_pixels"}
FEATURE_SETTINGS = {*PIXEL_SETTINGS, "dtype"}
"""The keys of the section `cache` that change the fingerprint."""


def source_of(run: RunFile, *, is_local: bool = False) -> Source:
    """The files and settings that the fingerprint of a run's cache is computed from; `is_local` downloads nothing.

    Raises:
        ModelError: there is no such model, or it is not on this machine.
    """
    folder = locate(run.model.path, run.model.revision, is_local=is_local)
    settings = run.cache.model_dump(mode="json", include=FEATURE_SETTINGS)
    return Source.of(folder, settings)


def open_model(source: Source, known: Fingerprint | None = None) -> tuple[ModelFolder, ImageProcessor, Fingerprint]:
    """The model folder, its image processor, and the fingerprint of the run's cache, computed unless it is `known`.

    Raises:
        ModelError: the model has no vision tower that is supported, or a file of it is broken.
    """
    from lookonce.cache.model.model_folder import ModelFolder
    from lookonce.cache.model.pixels import ImageProcessor

    pixels = {name: value for name, value in source.settings.items() if name in PIXEL_SETTINGS}
    model_folder, processor = ModelFolder.open(str(source.folder)), ImageProcessor(source.folder, **pixels)
    return model_folder, processor, known or Fingerprint.of(model_folder, processor, source.settings["dtype"])


def find_fingerprint(run: RunFile, *, is_local: bool = False) -> Fingerprint:
    """The fingerprint of a run's cache, for read-only commands; `is_local` downloads nothing.

    Opens the model only if its fingerprint has not been recorded.

    Raises:
        ModelError: there is no such model, or it is broken.
    """
    source = source_of(run, is_local=is_local)  # before reading, so that a change meanwhile is noticed later
    return fingerprint_of(source, run.cache.dir)


def fingerprint_of(source: Source, root: Path) -> Fingerprint:
    """The fingerprint of a source as recorded in `root`, the folder of caches; else computed and recorded there."""
    if known := source.read_note(root):
        return known
    fingerprint = open_model(source)[-1]
    source.write_note(root, fingerprint)
    return fingerprint
