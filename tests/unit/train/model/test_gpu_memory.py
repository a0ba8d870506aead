"""The figures of GPU memory are those of the documents."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lookonce.run.sections.train import UNQUANTISED
from lookonce.train.model.gpu_memory import (
    CARDS_GB,
    LENGTHS,
    MODELS,
    card_of,
    is_measured,
    longest_pack,
    measured_name,
    peak_gb,
    sparing,
)


def number(text: str) -> int:
    return int(text.replace(",", "")) if text[0].isdigit() else 0


def test_the_longest_packs_are_those_of_the_documented_table(root):
    page = (root / "docs" / "training.md").read_text()
    rows = re.findall(r"^\| (Qwen3-VL-\d+B) \| (.+) \|$", page, re.M)
    assert len(rows) == len(MODELS) and f"| {' | '.join(f'{card} GB' for card in CARDS_GB)} |" in page
    for name, cells in rows:
        assert (
            tuple(number(cell.partition(" or more")[0]) for cell in cells.split(" | ")) == MODELS[name].longest[False]
        )
    assert "except for the 8B\nin 24 GB, where 7,424 do" in page
    assert [one for model in MODELS.values() for one in model.longest[True] if one != 16384] == [7424]


def test_the_peaks_are_those_of_the_report(root):
    report = (root / "benchmarks" / "training_h200_2026-11-21.md").read_text().partition("**What fits**")[2]
    rows = re.findall(r"^\| (\dB)(, checkpointing)? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", report, re.M)
    assert len(rows) == 2 * len(MODELS) and LENGTHS == (2048, 7680)
    for name, checkpointing, first, middle, last in rows:
        peaks = MODELS[f"Qwen3-VL-{name}"].peaks_gb[bool(checkpointing)]
        assert peaks == (float(first), float(last))
        assert peak_gb(f"Qwen3-VL-{name}", 4096, bool(checkpointing)) == pytest.approx(float(middle), rel=0.03)


def test_the_longest_pack_leaves_some_memory_free():
    for name, model in MODELS.items():
        for checkpointing, longest in model.longest.items():
            for card, tokens in zip(CARDS_GB, longest, strict=True):
                assert peak_gb(name, tokens, checkpointing) < 0.93 * card or not tokens


@pytest.mark.parametrize(("frozen", "saved"), [("nf4", (2.0, 5.3, 10.1)), ("int8", (1.4, 3.5, 6.7))])
def test_quantised_weights_save_the_documented_memory(root, frozen, saved):
    for name, gigabytes in zip(MODELS, saved, strict=True):
        less = peak_gb(name, 4096, False) - peak_gb(name, 4096, False, frozen)
        assert less == pytest.approx(gigabytes, abs=0.05)
        longest = longest_pack(name, 24, True, frozen)
        assert longest > 0 and peak_gb(name, longest, True, frozen) <= 0.9 * 24
    cells = " | ".join(f"{one} GB" for one in saved)
    assert f" | {cells} | " in (root / "docs" / "training.md").read_text()


@pytest.mark.parametrize(("gpu_gb", "card"), [(16.0, None), (23.8, 24), (48.3, 40), (85.0, 80), (150.0, 141)])
def test_a_gpu_counts_as_the_next_smaller_card_of_the_table(gpu_gb, card):
    assert card_of(gpu_gb) == card
    assert bool(longest_pack("Qwen3-VL-2B", gpu_gb, False)) == bool(card)


@pytest.mark.parametrize(("gpu_gb", "expected"), [(60, "selective"), (30, True), (10, True)])
def test_the_fastest_checkpointing_that_fits_is_offered_or_the_one_with_the_least_memory(monkeypatch, gpu_gb, expected):
    measured = MODELS["Qwen3-VL-8B"]
    between = {False: measured.peaks_gb[False], "selective": (22.0, 36.0), True: measured.peaks_gb[True]}
    monkeypatch.setitem(MODELS, "Qwen3-VL-8B", replace(measured, peaks_gb=between))
    assert is_measured("Qwen3-VL-8B", "selective")
    assert sparing("Qwen3-VL-8B", 8192, gpu_gb, False, UNQUANTISED) == expected
    assert sparing("Qwen3-VL-8B", 8192, gpu_gb, True, UNQUANTISED) is True


def test_a_model_is_recognised_by_its_configuration_or_else_by_its_name():
    text = SimpleNamespace(hidden_size=4096, num_hidden_layers=36)
    assert measured_name("models/mine", SimpleNamespace(text_config=text)) == "Qwen3-VL-8B"
    assert measured_name("models/Qwen3-VL-8B", SimpleNamespace(text_config=SimpleNamespace())) is None
    assert measured_name("Qwen/Qwen3-VL-4B-Instruct") == "Qwen3-VL-4B"
    assert measured_name("Qwen/Qwen3-VL-32B-Instruct") is None
