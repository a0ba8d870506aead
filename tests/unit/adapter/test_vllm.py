"""An adapter as lookonce writes it keeps vLLM's rules; each rule can fail, and names its source."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from peft import LoraConfig

from lookonce.adapter.vllm import RANKS, rules_for, serve_command
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.train.model.lora import lora_config

LAYER = "base_model.model.model.language_model.layers.0"
NAMES = [f"{LAYER}.{module}.lora_{part}.weight" for module in ("self_attn.q_proj", "mlp.down_proj") for part in "AB"]
EXPERT_NAMES = [f"{LAYER}.mlp.experts.{module}lora_{part}.weight" for module in ("", "base_layer.") for part in "AB"]


def written(make_run, **lora) -> dict:
    """The configuration of an adapter as a run's training writes it."""
    config: LoraConfig = lora_config(make_run(lora=lora).lora)
    return config.to_dict()


def failed(config, names=NAMES, family=DEFAULT) -> list[str]:
    return [rule.name for rule in rules_for(config, names, family) if not rule.passed]


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES.values() if family.experts], ids=lambda family: family.name
)
def test_the_default_adapter_and_one_of_experts_keep_all_rules(make_run, family):
    assert failed(written(make_run)) == []
    assert failed(written(make_run, experts=True), [*NAMES, *EXPERT_NAMES], family) == []


@pytest.mark.parametrize(
    ("change", "names", "rule"),
    [
        ({"modules_to_save": ["embed_tokens"]}, NAMES, "modules trained as a whole"),
        ({"r": 513}, NAMES, "rank"),
        ({}, [*NAMES, "base_model.model.lm_head.weight"], "names of tensors"),
        ({}, [*NAMES, "base_model.model.lm_head.lora_A.weight"], "modules"),
    ],
)
def test_what_breaks_a_rule_fails_that_rule(make_run, change, names, rule):
    assert failed(written(make_run) | change, names) == [rule]
    assert failed(written(make_run) | change, names, replace(DEFAULT, vllm_lora="")) == ["model", rule]


def test_each_rule_names_code_of_a_release_or_at_a_commit_or_a_pull_request(make_run):
    pinned = r"/en/v\d+\.\d+\.\d+/api/vllm/\S+$|/blob/[0-9a-f]{40}/vllm/\S+\.py$|/vllm/pull/\d+$"
    for rule in rules_for(written(make_run), NAMES, FAMILIES["qwen3_5"]):
        assert re.search(pinned, rule.source), rule


@pytest.mark.parametrize(("rank", "flag"), [(4, 8), (16, 16), (257, 320), (512, 512)])
def test_the_command_has_the_smallest_rank_that_vllm_takes(make_run, tmp_path, rank, flag):
    assert flag in RANKS
    command = serve_command(make_run(), tmp_path / "run" / "adapter", rank)
    assert f" --max-lora-rank {flag} " in command and f" run={tmp_path}/run/adapter" in command
