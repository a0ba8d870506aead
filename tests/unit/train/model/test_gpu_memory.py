"""The figures of GPU memory are those of the documents."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from lookonce.run.sections import UNQUANTISED
from lookonce.train.model.gpu_memory import (
    CARDS_GB,
    DRAWN_MS,
    DRAWN_TOKENS,
    LEAST_TOKENS,
    LENGTHS,
    MODELS,
    MOST_TOKENS,
    Fit,
    fits,
    hint,
    longest_pack,
    measured_name,
    out_of_memory,
    peak_gb,
    usable_gb,
)

VALUES = {"false": False, "selective": "selective", "true": True}


def number(text: str) -> int:
    return int(text.replace(",", "").rstrip("+")) if text[0].isdigit() else 0


@pytest.mark.guarantee("The proposed packs equal those of the documented table of GPU memory.")
def test_the_longest_packs_are_those_of_the_documented_table(root):
    page = (root / "docs" / "training.md").read_text()
    rows = re.findall(r"^\| (\dB) \| `(\w+)` \| `(\w+)` \| (.+) \|$", page, re.M)
    assert len(rows) == 6 * len(MODELS) and f" | {' | '.join(f'{card} GB' for card in CARDS_GB)} |" in page
    for model, frozen, checkpointing, cells in rows:
        longest = [longest_pack(f"Qwen3-VL-{model}", card, VALUES[checkpointing], frozen) for card in CARDS_GB]
        assert [number(cell) for cell in cells.split(" | ")] == longest
        assert all(("+" in cell) == (number(cell) == MOST_TOKENS) for cell in cells.split(" | "))


@pytest.mark.guarantee("The figures of the documented table of GPU memory equal those of its report.")
def test_the_peaks_are_those_of_the_report(root):
    found = {}
    for day in (23, 24):  # what was measured again replaces what was
        report = (root / "benchmarks" / f"training_h200_2026-11-{day}.md").read_text().partition("**What fits**")[2]
        rows = re.findall(r"^\| (\dB) \| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|$", report, re.M)
        assert rows
        found |= {(model, checkpointing): (float(first), float(last)) for model, checkpointing, first, last in rows}
    assert len(found) == 3 * len(MODELS) and LENGTHS == (2048, 7680)
    for (model, checkpointing), peaks in found.items():
        assert MODELS[f"Qwen3-VL-{model}"].peaks_gb[VALUES[checkpointing]] == peaks


def test_the_times_of_drawn_answers_are_those_of_the_report(root):
    report = (root / "benchmarks/grpo_h100_2026-11-26.md").read_text()
    rows = re.findall(r"^\| (\dB), `shared`, (\d+) tokens \|[^|]*\| \*\*([\d.]+)\*\*", report, re.M)
    found = {(f"Qwen3-VL-{model}", int(tokens)): float(milliseconds) for model, tokens, milliseconds in rows}
    assert found == {(name, n): ms for name, of in DRAWN_MS.items() for n, ms in zip(DRAWN_TOKENS, of, strict=True)}


@pytest.mark.parametrize(("gpu_gb", "usable"), [(12, 9.75), (22.5, 20.25), (24, 21.6), (80, 72)])
def test_some_memory_stays_free(gpu_gb, usable):
    assert usable_gb(gpu_gb) == pytest.approx(usable)
    for name, model in MODELS.items():
        for checkpointing in model.peaks_gb:
            longest = longest_pack(name, gpu_gb, checkpointing)
            assert not longest or peak_gb(name, longest, checkpointing) <= usable
            assert longest == MOST_TOKENS or peak_gb(name, max(longest + 128, LEAST_TOKENS), checkpointing) > usable


@pytest.mark.parametrize(("frozen", "saved"), [("nf4", (2.0, 5.3, 10.1)), ("int8", (1.4, 3.5, 6.7))])
def test_nine_tenths_of_what_quantised_weights_save_are_counted_on(root, frozen, saved):
    for name, gigabytes in zip(MODELS, saved, strict=True):
        less = peak_gb(name, 4096, False) - peak_gb(name, 4096, False, frozen)
        assert less == pytest.approx(0.9 * gigabytes, abs=0.05)
    cells = " | ".join(f"{one} GB" for one in saved)
    assert f" | {cells} | " in (root / "docs" / "training.md").read_text()


def test_settings_that_fit_begin_with_the_given_ones_and_then_need_less_memory():
    assert fits("Qwen3-VL-8B", 24) == [
        Fit(UNQUANTISED, "selective", 1536),
        Fit(UNQUANTISED, True, 4480),
        Fit("nf4", False, 3200),
        Fit("nf4", "selective", 5888),
        Fit("nf4", True, 16384),
    ]
    assert [(fit.frozen, fit.checkpointing) for fit in fits("Qwen3-VL-8B", 24, True, "int8")] == [
        ("int8", True),
        ("nf4", True),
    ]
    assert not fits("Qwen3-VL-8B", 8)


def test_a_message_names_what_fits():
    assert hint("Qwen3-VL-4B", 16.0, "selective", UNQUANTISED) == (
        "; what fits by docs/training.md#memory: packs of 2,176 tokens, 7,168 tokens with "
        "train.gradient_checkpointing=true, 4,864 tokens with train.frozen=nf4, 15,488 tokens with train.frozen=nf4 "
        "and train.gradient_checkpointing=true"
    )
    assert "of 2,176 tokens, " in hint("Qwen3-VL-4B", 16.0, "selective", UNQUANTISED, 2177)
    assert "of 7,168 tokens with" in hint("Qwen3-VL-4B", 16.0, "selective", UNQUANTISED, 2176)
    assert hint(None, 16.0, False, UNQUANTISED) == hint("Qwen3-VL-8B", None, False, UNQUANTISED) == ""
    assert out_of_memory(23.8, 8192).startswith("out of memory on this GPU of 23.8 GB; lower batch.tokens_per_pack")


def test_a_model_is_recognised_by_its_configuration_or_else_by_its_name():
    text = SimpleNamespace(hidden_size=4096, num_hidden_layers=36)
    assert measured_name("models/mine", SimpleNamespace(text_config=text)) == "Qwen3-VL-8B"
    assert measured_name("models/Qwen3-VL-8B", SimpleNamespace(text_config=SimpleNamespace())) is None
    assert measured_name("Qwen/Qwen3-VL-4B-Instruct") == "Qwen3-VL-4B"
    assert measured_name("Qwen/Qwen3-VL-32B-Instruct") is None
