"""How many tokens are answered together: as many as there is memory for.

Design: this follows from the whole memory of the GPU and the model, not from what is free at the moment. So waves are
the same each time, and the answers of an interrupted evaluation have the bits of an uninterrupted one. If other
programs hold memory, a wave may not fit; it is then answered in parts (engines.py). Only beside a training, which holds
most of the memory, it follows from what is free.

In models with linear attention each question has a state, which takes as much memory as hundreds or thousands of
tokens. The number of states has a limit of its own, as short questions may be many.
"""

from __future__ import annotations

import torch

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.eval.decoding.passes.key_values import bytes_per_token
from lookonce.eval.decoding.passes.states import WORKING, bytes_per_state
from lookonce.train.model.linear_attention import LINEAR

ON_CPU = 8192
SMALLEST, LARGEST = 4096, 65_536
"""Tokens of a wave. With more than the largest a GPU is not faster, and the logits of a step take gigabytes."""
SPARE = 0.1
"""Share of the memory that stays free, for CUDA and for what PyTorch reserves without using it."""
PROMPTS = 2e9
"""Bytes that passes over packs of prompts take."""
PLACES_OF_BRANCH = 64
"""About the number of tokens of a wave to a branch, each of which has logits, and at least that to a state."""
BYTES_OF_LOGIT = 14
"""A logit in bfloat16, and three times in float32."""


def largest_wave(model_folder: ModelFolder, dtype: torch.dtype) -> int:
    """The largest power of 2 whose keys, values and logits fit beside the weights, within limits."""
    if not torch.cuda.is_available():
        return ON_CPU
    total = torch.cuda.get_device_properties(0).total_memory
    return _tokens_in(total * (1 - SPARE) - weight_bytes(model_folder, dtype), model_folder, dtype)


def tokens_beside_training(model_folder: ModelFolder, dtype: torch.dtype) -> int:
    """The same for the memory that is free while a model is trained on the current GPU."""
    free, total = torch.cuda.mem_get_info()
    return _tokens_in(free - total * SPARE, model_folder, dtype)


def states_per_wave(model_folder: ModelFolder, num_tokens: int) -> int | None:
    """The states of linear attention that a wave of `num_tokens` may have; None for models without them."""
    has_states = LINEAR in model_folder.family.layer_types
    return max(num_tokens // PLACES_OF_BRANCH, 1) if has_states else None


def _tokens_in(num_bytes: float, model_folder: ModelFolder, dtype: torch.dtype) -> int:
    text = model_folder.config.get_text_config()
    of_branch = text.vocab_size * BYTES_OF_LOGIT + bytes_per_state(text, dtype, num_more=WORKING)
    each = bytes_per_token(text, dtype) + of_branch // PLACES_OF_BRANCH
    tokens = int((num_bytes - PROMPTS) // each)
    return min(1 << max(tokens, SMALLEST).bit_length() - 1, LARGEST)


def weight_bytes(model_folder: ModelFolder, dtype: torch.dtype) -> float:
    """Bytes of the weights in memory, tower included, for files with the data type of the model's config."""
    in_files = model_folder.config.dtype
    size = in_files.itemsize if isinstance(in_files, torch.dtype) else torch.bfloat16.itemsize
    return model_folder.num_weight_bytes * dtype.itemsize / size
