"""How passes run: their precision, their attention, and the buffers that they write to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lookonce.eval.decoding.passes.attention import PROMPTS
from lookonce.eval.decoding.passes.key_values import KeyValues
from lookonce.train.model.compile import training_on_packs


@contextlib.contextmanager
def inference(model: Any, dtype: torch.dtype, keys: KeyValues, *, compiled: bool = False) -> Iterator[None]:
    """Passes without gradients, under autocast to `dtype` unless that is float32, and with `compiled` decoder layers.

    Autocast keeps no casts of weights: they would be freed at the end, and captured passes would read them later.
    """
    is_on = dtype != torch.float32
    autocast = torch.autocast(model.device.type, dtype, enabled=is_on, cache_enabled=False)
    on_packs = training_on_packs(model, compiled=compiled, attention=PROMPTS)
    with torch.inference_mode(), autocast, on_packs, keys.attached():
        yield
