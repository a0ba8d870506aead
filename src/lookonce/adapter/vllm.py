"""Whether vLLM serves an adapter beside its model: its published rules, each with the code that it was read in.

Design: the rules are compared with the adapter's two files; nothing of vLLM is imported. A rule is that of the release
or the commit in its source, and vLLM changes: a pass is no proof, and the command that is printed is the test. A
release is named only if the code of the rule was read in the pages that vLLM publishes for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lookonce.cache.format import read_header
from lookonce.families.family import VLLM_LORA, Family
from lookonce.files import read_json
from lookonce.run.config import RunFile
from lookonce.run.open import Needs, open_run
from lookonce.text import listed, shell

LORA_UTILS = "https://github.com/vllm-project/vllm/blob/001e63a89b474b88345fd72912fe068c4ae83f41/vllm/lora/utils.py"
RELEASES = "https://docs.vllm.ai/en"
WHOLE_MODULES = f"{RELEASES}/v0.10.0/api/vllm/lora/peft_helper.html"
LORA_CONFIG = f"{RELEASES}/v0.14.0/api/vllm/config/lora/"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that `--max-lora-rank` can have."""
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""The linear layers of a decoder layer that vLLM has under these names, or packed."""
EXPERTS = ".experts"
WEIGHTS = (".lora_A.weight", ".lora_B.weight")
LINEAR_ATTENTION = "https://github.com/vllm-project/vllm/issues/49354"
EXPERT_WEIGHTS = "https://github.com/vllm-project/vllm/pull/41384"
"""Reports that vLLM takes an adapter without a message and answers as if it were not there."""


@dataclass(frozen=True)
class Rule:
    name: str
    passed: bool
    found: str
    """What the adapter has."""
    source: str


@dataclass(frozen=True)
class Check:
    adapter: Path
    rules: list[Rule]
    command: str
    notes: list[str]

    @property
    def passed(self) -> bool:
        return all(rule.passed for rule in self.rules)

    def to_json(self) -> dict[str, Any]:
        return {"for": "vllm", "passed": self.passed} | asdict(self)

    def text(self) -> str:
        width = max(len(rule.name) for rule in self.rules)
        lines = [f"vLLM's rules for {self.adapter}, each with the code of the release or commit that it was read in:"]
        for rule in self.rules:
            mark = "pass" if rule.passed else "FAIL"
            lines += [f"  {mark}  {rule.name:<{width}}  {rule.found}", f"        {rule.source}"]
        merge = shell("lookonce", "adapter", "merge", self.adapter.parent, "DIR")
        ways = (
            ["serve it with:", f"  {self.command}"] if self.passed else [f"vLLM does not serve it; merge it: {merge}"]
        )
        return "\n".join([*lines, *self.notes, *ways])


def check_for_vllm(run_path: Path) -> Check:
    """Compare a trained run's adapter with vLLM's rules; raises RunFolderError if it is missing or broken."""
    from lookonce.cache.model.pixels import ImageProcessor
    from lookonce.families.lookup import family_in
    from lookonce.hub import locate

    opened = open_run(run_path, Needs("lookonce adapter check", adapter=True, recorded=True))
    run, adapter = opened.run, opened.folder.adapter
    config, header = read_json(adapter / "adapter_config.json"), read_header(adapter / "adapter_model.safetensors")[0]
    names, model = sorted(header.keys() - {"__metadata__"}), locate(run.model.path, run.model.revision, is_local=True)
    size = None
    if run.cache.min_pixels or run.cache.max_pixels:  # under transformers' names: it drops `min_pixels`, `max_pixels`
        settings = ImageProcessor(model, "pil", run.cache.min_pixels, run.cache.max_pixels).settings
        size = {"shortest_edge": settings["min_pixels"], "longest_edge": settings["max_pixels"]}
    family = family_in(model)
    command = serve_command(run, adapter, config["r"], size)
    return Check(adapter, rules_for(config, names, family), command, _notes(names, family, run))


def rules_for(config: Mapping[str, Any], names: Sequence[str], family: Family) -> list[Rule]:
    """vLLM's rules that an adapter of a run can break, compared with its configuration and the names of its tensors."""
    rank, saved = config["r"], config.get("modules_to_save") or []
    strange = [name for name in names if not name.endswith(WEIGHTS)]
    modules = {name.rsplit(".", 3)[1] for name in names if name.endswith(WEIGHTS) and EXPERTS not in name}
    unknown = sorted(modules - LINEAR)
    return [
        Rule("model", bool(family.vllm_lora), family.name, family.vllm_lora or VLLM_LORA),
        Rule("modules trained as a whole", not saved, listed(saved) or "none", WHOLE_MODULES),
        Rule("rank", rank <= RANKS[-1], f"{rank} (at most {RANKS[-1]})", LORA_CONFIG),
        Rule("names of tensors", not strange, listed(strange, 2) or f"{len(names)} LoRA tensors", LORA_UTILS),
        Rule("modules", not unknown, listed(unknown or sorted(modules), 8) or "none", LORA_UTILS),
    ]


def serve_command(run: RunFile, adapter: Path, rank: int, size: Mapping[str, int] | None = None) -> str:
    """The command that serves the adapter beside its model; `size` are the limits of the run's images."""
    limit = next((max_rank for max_rank in RANKS if max_rank >= rank), RANKS[-1])
    words = ["vllm", "serve", run.model.path, "--enable-lora", "--max-lora-rank", str(limit)]
    words += ["--revision", run.model.revision] if run.model.revision else []
    words += ["--lora-modules", f"{adapter.absolute().parent.name}={adapter}"]
    words += ["--mm-processor-kwargs", json.dumps({"size": size})] if size else []
    return shell(*words)


def _notes(names: Sequence[str], family: Family, run: RunFile) -> list[str]:
    """Where vLLM was seen to answer as if there were no adapter, and where other weights were trained with it."""
    ignored = {}
    if "linear_attention" in family.layer_types:
        ignored[f"all LoRA weights of {family.name}, which has linear attention"] = LINEAR_ATTENTION
    if any(EXPERTS in name for name in names):
        ignored["the LoRA weights of experts"] = EXPERT_WEIGHTS
    notes = [
        f"warning: vLLM was reported to ignore {weights}, without a message ({source}); compare some answers with "
        "those of `lookonce predict`, or merge the adapter"
        for weights, source in ignored.items()
    ]
    if run.train.frozen in ("int8", "nf4"):
        notes.append(
            f"note: the adapter was trained on weights quantised to {run.train.frozen}; on the unquantised weights it "
            "gives other answers"
        )
    return notes
