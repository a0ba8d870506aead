"""The model that a run begins with, and the fingerprint that it gives its cache: the noted one, or found.

Design: the model is located once, and everything else is told where: a branch on the Hub may move between two looks,
and what one commit was found to be must not be noted of another. Opening is given nothing but what the note tells
apart, so no setting can change the fingerprint behind its back. Torch is imported only where the model is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.fingerprint_notes import Source
from lookonce.hub import locate
from lookonce.run.config import RunFile

if TYPE_CHECKING:
    from lookonce.cache.model.model_folder import ModelFolder
    from lookonce.cache.model.pixels import ImageProcessor


def source_of(run: RunFile, *, is_local: bool = False) -> Source:
    """What the fingerprint of a run's cache is found from; `is_local` downloads nothing.

    Raises:
        ModelError: there is no such model, or it is not here.
    """
    folder = locate(run.model.path, run.model.revision, is_local=is_local)
    settings = run.cache.model_dump(mode="json", include={"dtype", "backend", "min_pixels", "max_pixels"})
    return Source.of(folder, settings)


def open_model(source: Source) -> tuple[ModelFolder, ImageProcessor, Fingerprint]:
    """A run's checkpoint, how it takes images, and the fingerprint of its cache.

    Raises:
        ModelError: it is no model with a vision tower, or a file of it is broken.
    """
    from lookonce.cache.model.model_folder import ModelFolder
    from lookonce.cache.model.pixels import ImageProcessor

    pixels = {name: value for name, value in source.settings.items() if name != "dtype"}
    model_folder, processor = ModelFolder.open(str(source.folder)), ImageProcessor(source.folder, **pixels)
    return model_folder, processor, Fingerprint.of(model_folder, processor, source.settings["dtype"])


def find_fingerprint(run: RunFile, *, is_local: bool = False) -> Fingerprint:
    """The fingerprint of a run's cache, for who only looks; `is_local` downloads nothing.

    Opens the model if its fingerprint is not noted.

    Raises:
        ModelError: there is no such model, or it is broken.
    """
    source = source_of(run, is_local=is_local)  # before it is read: what changes meanwhile must not look as it was
    if known := source.recall(run.cache.dir):
        return known
    fingerprint = open_model(source)[-1]
    source.remember(run.cache.dir, fingerprint)
    return fingerprint
