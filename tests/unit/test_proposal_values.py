"""Proposed values follow from what is stated, and say from what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lookonce.proposal import Facts, Proposal, Sampled, propose

FACTS = Facts(
    num_records=40_000,
    num_images=4_000,
    sampled=(Sampled(50, (500,)), Sampled(90, (2_000,))),
    num_unreadable=0,
    has_tokenizer=True,
    pixels_per_token=1024,
    measured="Qwen3-VL-8B",
    bytes_per_token=32_768,
    has_linear_attention=False,
    thinks=False,
    gpu_gb=80.0,
    num_cores=16,
    free_bytes=10**12,
)


def proposed(**changes) -> dict[str, Proposal]:
    return {one.key: one for one in propose(replace(FACTS, **changes))}


@pytest.mark.guarantee("The proposed packs equal those of the documented table of GPU memory.")
@pytest.mark.parametrize(
    ("model", "gpu_gb", "tokens", "checkpointing", "frozen"),
    [
        ("Qwen3-VL-8B", 80, 8192, None, None),
        ("Qwen3-VL-8B", 48, 6656, None, None),
        ("Qwen3-VL-8B", 24, 4480, True, None),
        ("Qwen3-VL-8B", 16, 2176, "selective", "nf4"),
        ("Qwen3-VL-4B", 24, 3712, None, None),
        ("Qwen3-VL-4B", 16, 2176, "selective", None),
        ("Qwen3-VL-4B", 12, 2560, "selective", "nf4"),
        ("Qwen3-VL-2B", 12, 3072, None, None),
    ],
)
def test_packs_are_those_of_the_documented_table(model, gpu_gb, tokens, checkpointing, frozen):
    found = proposed(measured=model, gpu_gb=float(gpu_gb))
    assert found["batch.tokens_per_pack"].value == tokens
    values = [found[key].value if key in found else None for key in ("train.gradient_checkpointing", "train.frozen")]
    assert values == [checkpointing, frozen]
    assert "docs/training.md#memory" in found["batch.tokens_per_pack"].reason


def test_all_linear_layers_are_proposed_where_the_default_targets_miss_some():
    assert "lora.targets" not in proposed()
    found = proposed(has_linear_attention=True)["lora.targets"]
    assert found.value == "all-linear" and "docs/models.md" in found.reason


def test_a_template_that_thinks_is_told_not_to():
    assert "data.enable_thinking" not in proposed()
    found = proposed(thinks=True)["data.enable_thinking"]
    assert found.value is False and "training refuses all records; docs/models.md#thinking" in found.reason


def test_what_makes_a_model_fit_is_said():
    found = proposed(gpu_gb=16.0)
    assert found["batch.tokens_per_pack"].reason == (
        "Qwen3-VL-8B with train.frozen=nf4 and train.gradient_checkpointing=selective fits 2,176 in 16 GB "
        "(docs/training.md#memory)"
    )
    assert "without it, Qwen3-VL-8B fits no packs of 2,048 in 16 GB" in found["train.frozen"].reason
    assert "pip install 'lookonce[qlora]'" in found["train.frozen"].reason


def test_a_gpu_that_is_too_small_is_said():
    found = proposed(gpu_gb=8.0)
    reason = found["batch.tokens_per_pack"].reason
    assert "Qwen3-VL-8B needs about 11 GB and some to spare, and this GPU has 8: take a smaller model" in reason
    assert found["train.gradient_checkpointing"].value is True and found["train.frozen"].value == "nf4"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"gpu_gb": None}, "no GPU is on this machine"), ({"measured": None}, "memory of this model was not measured")],
)
def test_without_measurements_the_default_is_proposed(changes, reason):
    found = proposed(**changes)["batch.tokens_per_pack"]
    assert found.value == 8192 and found.reason.startswith("the default") and reason in found.reason


@pytest.mark.parametrize(
    ("num_records", "num_images", "value"),
    [(40_000, 4_000, 64), (40_000, 40_000, 16), (439, 44, 16), (100, 10, 8), (100, 100, 8)],
)
def test_steps_are_larger_with_several_questions_per_image_and_an_epoch_has_some(num_records, num_images, value):
    assert proposed(num_records=num_records, num_images=num_images)["batch.samples_per_step"].value == value


def test_images_are_left_alone_if_all_records_fit():
    found = proposed()["cache.max_pixels"]
    assert found.value is None and "the longest record has 2,090 tokens, and 4,096 fit" in found.reason


def test_images_are_shrunk_until_99_percent_of_the_records_fit():
    many = tuple(Sampled(96, (8_000,)) for _ in range(199)) + (Sampled(4_000, (8_000,)),)
    found = proposed(sampled=many)["cache.max_pixels"]
    assert found.value == 4_000 * 1024 and "99% of the records fit 4,096 tokens" in found.reason
    two = proposed(sampled=(Sampled(96, (8_000, 8_000)),))["cache.max_pixels"]
    assert two.value == 2_000 * 1024
    short = proposed(sampled=many, gpu_gb=24.0, measured="Qwen3-VL-4B")["cache.max_pixels"]
    assert short.value == (3_712 - 96) * 1024 and "3,712 tokens" in short.reason


def test_texts_counted_by_the_byte_are_said():
    assert "a byte of text counts as a token" in proposed(has_tokenizer=False)["cache.max_pixels"].reason


def test_features_are_halved_if_the_disk_is_too_small():
    assert proposed()["cache.dtype"].value is None
    needed = 1_250 * 4_000 * 32_768
    found = proposed(free_bytes=needed)["cache.dtype"]
    assert found.value == "fp8_e4m3" and "half of bfloat16, which needs about 163.8 GB" in found.reason
    assert proposed(bytes_per_token=None, free_bytes=1)["cache.dtype"].value is None
