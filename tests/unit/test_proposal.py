"""Proposed values follow from records, model and GPU, and say from what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lookonce.errors import UsageError
from lookonce.proposal import Facts, Proposal, find_facts, propose, refuse_existing

FACTS = Facts(40_000, 4_000, "Qwen3-VL-8B", has_linear_attention=False, thinks=False, gpu_gb=80.0)


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


def test_a_model_with_linear_attention_gets_all_linear_layers_and_a_template_that_thinks_is_told_not_to():
    assert not {"lora.targets", "data.enable_thinking"} & proposed().keys()
    found = proposed(has_linear_attention=True)["lora.targets"]
    assert found.value == "all-linear" and "docs/models.md" in found.reason
    found = proposed(thinks=True)["data.enable_thinking"]
    assert found.value is False and "training refuses all records; docs/models.md#thinking" in found.reason


def test_what_makes_a_model_fit_is_said_and_so_is_a_gpu_that_is_too_small():
    found = proposed(gpu_gb=16.0)
    assert found["batch.tokens_per_pack"].reason == (
        "Qwen3-VL-8B with train.frozen=nf4 and train.gradient_checkpointing=selective fits packs of 2,176 tokens in "
        "16 GB (docs/training.md#memory)"
    )
    assert "without it, Qwen3-VL-8B fits no packs of 2,048 tokens in 16 GB" in found["train.frozen"].reason
    assert "pip install 'lookonce[qlora]'" in found["train.frozen"].reason
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


def test_a_run_file_is_not_written_over_a_folder_or_a_link(tmp_path):
    (tmp_path / "link.yaml").symlink_to("nowhere.yaml")
    with pytest.raises(UsageError, match=r"link\.yaml exists; name another file, or replace it with --force"):
        refuse_existing(tmp_path / "link.yaml", force=False)
    for force in (False, True):
        with pytest.raises(UsageError, match=r"is a folder; name a file in it, such as .*/run\.yaml"):
            refuse_existing(tmp_path, force)


@pytest.mark.parametrize(
    ("num_records", "num_images", "value"),
    [(40_000, 4_000, 64), (40_000, 40_000, 16), (439, 44, 16), (100, 10, 8), (100, 100, 8)],
)
def test_steps_are_larger_with_several_questions_per_image_and_an_epoch_has_some(num_records, num_images, value):
    assert proposed(num_records=num_records, num_images=num_images)["batch.samples_per_step"].value == value


def test_records_images_and_machine_are_counted_whether_the_model_is_here_or_not(make_run, monkeypatch):
    here = find_facts(make_run(), gpu_memory_gb=24)
    assert (here.num_records, here.num_images, here.measured, here.gpu_gb) == (439, 46, None, 24)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_facts(make_run(model={"path": "Qwen/Qwen3-VL-4B-no-such"})).measured == "Qwen3-VL-4B"
