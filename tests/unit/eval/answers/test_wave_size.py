"""Waves have as many tokens as the GPU has memory for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lookonce.eval.answers.wave_size import ON_CPU, tokens_per_wave

TEXT_8B = SimpleNamespace(num_hidden_layers=36, num_key_value_heads=8, head_dim=128, vocab_size=151_936)
TEXT_2B = SimpleNamespace(num_hidden_layers=28, num_key_value_heads=8, head_dim=128, vocab_size=151_936)


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
    [(141, TEXT_8B, 17.5, 65_536), (24, TEXT_8B, 17.5, 8192), (24, TEXT_2B, 4.3, 65_536), (16, TEXT_8B, 17.5, 4096)],
)
def test_waves_grow_with_the_memory_beside_the_weights(gpu, gb, text, weight_gb, tokens):
    gpu(gb)
    assert tokens_per_wave(model(text, weight_gb), torch.bfloat16) == tokens


def test_float32_takes_twice_the_memory(gpu):
    gpu(48)
    each = [tokens_per_wave(model(TEXT_8B, 17.5), dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert each == [65_536, 16_384]


def test_a_cpu_takes_few(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tokens_per_wave(model(TEXT_8B, 17.5), torch.float32) == ON_CPU
