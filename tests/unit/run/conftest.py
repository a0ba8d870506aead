"""One tower for all builds: to load it takes longer than to encode the few images of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lookonce.cache.model.tower import Tower
from lookonce.run.inputs import RunInputs

loaded: dict[tuple[object, ...], Tower] = {}


@pytest.fixture(autouse=True, scope="module")
def one_tower(sample: Path) -> Iterator[None]:
    """Loads the tower of the sample's model once for each dtype."""
    load_tower = RunInputs.load_tower

    def load_once(inputs: RunInputs, **options: Any) -> Tower:
        kind = (inputs.model_folder.folder, inputs.fingerprint.dtype, *options.items())
        if inputs.model_folder.folder != sample / "model":
            return load_tower(inputs, **options)
        if kind not in loaded:
            loaded[kind] = load_tower(inputs, **options)
        return loaded[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunInputs, "load_tower", load_once)
        yield
