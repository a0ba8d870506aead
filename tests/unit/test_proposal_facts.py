"""What is found out about records, model and machine."""

from __future__ import annotations

import pytest

import lookonce.proposal as facts
from lookonce.proposal import find_facts


@pytest.fixture(scope="module")
def local(make_run_in, tmp_path_factory):
    """Facts with the model on this machine."""
    return find_facts(make_run_in(tmp_path_factory.mktemp("facts")), gpu_memory_gb=24)


def test_records_images_and_machine_are_counted(local):
    assert (local.num_records, local.num_images, local.num_unreadable) == (439, 46, 0)
    assert len(local.sampled) == 439 and local.samples_per_image == pytest.approx(439 / 46)
    assert local.gpu_gb == 24 and local.num_cores > 0 and local.free_bytes > 0


def test_tokens_are_those_of_training(local):
    assert local.has_tokenizer and max(one.num_tokens for one in local.sampled) == 50
    assert local.bytes_per_token == 4 * 64 * 2 and local.cache_bytes(None) > local.cache_bytes(1024) > 0


def test_tokens_of_a_template_that_thinks_are_those_of_one_that_is_told_not_to(local, make_run, thinking_model):
    found = find_facts(make_run(model={"path": str(thinking_model)}))
    assert found.thinks and not local.thinks
    added = {one.num_tokens - plain.num_tokens for one, plain in zip(found.sampled, local.sampled, strict=True)}
    assert len(added) == 1 and added.pop() > 0, "the empty block of thoughts"


def test_a_model_that_is_not_here_needs_at_most_a_token_a_byte(local, make_run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = find_facts(make_run(model={"path": "Qwen/Qwen3-VL-4B-no-such"}))
    assert not found.has_tokenizer and found.measured == "Qwen3-VL-4B" and found.cache_bytes(None) is None
    pairs = zip(found.sampled, local.sampled, strict=True)
    assert all(bound.num_text_tokens >= exact.num_text_tokens for bound, exact in pairs)


def test_of_many_records_some_are_sampled_from_all_over(make_run, monkeypatch):
    monkeypatch.setattr(facts, "NUM_SAMPLED", 20)
    found = find_facts(make_run())
    assert len(found.sampled) == 20 and found.num_records == 439 and found.num_images == 46


def test_images_that_cannot_be_read_are_counted(make_run, tmp_path):
    found = find_facts(make_run(data={"image_root": str(tmp_path)}))
    assert found.num_unreadable == found.num_images > 40 and all(not one.image_tokens for one in found.sampled)
