"""Waves have as many tokens as the GPU has memory for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lookonce.eval.answers.engines import ON_CPU, largest_wave, states_per_wave
from lookonce.eval.decoding.buffers import bytes_per_state, bytes_per_token
from lookonce.families.qwen3_5 import QWEN3_5
from lookonce.families.qwen3_vl import QWEN3_VL

TEXT_8B = SimpleNamespace(num_hidden_layers=36, num_key_value_heads=8, head_dim=128, vocab_size=151_936)
TEXT_2B = SimpleNamespace(num_hidden_layers=28, num_key_value_heads=8, head_dim=128, vocab_size=151_936)

LINEAR_9B = SimpleNamespace(
    num_hidden_layers=32,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=248_320,
    layer_types=["full_attention" if number % 4 == 3 else "linear_attention" for number in range(32)],
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
"""Qwen3.5 9B: a state of 2 MiB in each of 24 layers, and 32 kB a token in the 8 others."""


def model(text: SimpleNamespace, weight_gb: float) -> SimpleNamespace:
    config = SimpleNamespace(dtype=torch.bfloat16, get_text_config=lambda: text)
    return SimpleNamespace(config=config, num_weight_bytes=int(weight_gb * 1e9))


@pytest.fixture
def gpu(monkeypatch):
    def set_memory(gb: float) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=int(gb * 1e9))
        )

    return set_memory


@pytest.mark.parametrize(
    ("gb", "text", "weight_gb", "tokens"),
    [
        (141, LINEAR_9B, 19, 65_536),
        (80, LINEAR_9B, 19, 32_768),
        (48, LINEAR_9B, 19, 16_384),
        (141, TEXT_8B, 17.5, 65_536),
        (24, TEXT_8B, 17.5, 8192),
        (24, TEXT_2B, 4.3, 65_536),
        (16, TEXT_8B, 17.5, 4096),
    ],
)
def test_waves_grow_with_the_memory_beside_the_weights(gpu, gb, text, weight_gb, tokens):
    gpu(gb)
    assert largest_wave(model(text, weight_gb), torch.bfloat16) == tokens


def test_float32_takes_twice_the_memory(gpu):
    gpu(48)
    each = [largest_wave(model(TEXT_8B, 17.5), dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert each == [65_536, 16_384]


def test_the_states_of_a_wave_fit_beside_its_tokens():
    """As few tokens to a question as there may be."""
    tokens, states = 32_768, states_per_wave(SimpleNamespace(family=QWEN3_5), 32_768)
    needed = bytes_per_token(LINEAR_9B, torch.bfloat16) * tokens + bytes_per_state(LINEAR_9B, torch.bfloat16) * states
    assert 25e9 < needed < 80e9 * 0.9 - 19e9 - 2e9
    assert states_per_wave(SimpleNamespace(family=QWEN3_5), 10) == 1
    assert states_per_wave(SimpleNamespace(family=QWEN3_VL), 10) is None


def test_a_cpu_takes_few(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert largest_wave(model(TEXT_8B, 17.5), torch.float32) == ON_CPU
