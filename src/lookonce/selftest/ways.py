"""The ways to compute packs, and the settings of a run file that choose each.

Design: a way is three switches, as in the run file. Every switch that is off leaves out a part that could be wrong on a
machine where it was never tested: CUDA graphs, torch.compile, FlexAttention. What is left is slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from lookonce import environment
from lookonce.run.config import RunFile

SETTINGS = {"flex": "train.flex_attention", "compiled": "train.compile", "recorded": "train.cuda_graphs"}
"""The key of the run file for each switch."""
ROWS = "batch.mode=separate"
"""The setting that is left if no way is exact: stock rows."""


@dataclass(frozen=True)
class Way:
    """One way to compute packs."""

    flex: bool = True
    """Whether attention is computed by FlexAttention, and not with a dense mask."""
    compiled: bool = True
    """Whether the decoder layers are compiled."""
    recorded: bool = True
    """Whether passes are captured as CUDA graphs and replayed."""

    @classmethod
    def of(cls, run: RunFile) -> Way:
        """The way in which a run computes packs on a GPU."""
        options = run.train
        is_sharded = options.fsdp and environment.num_ranks() > 1
        keeps_random_states = options.gradient_checkpointing and not options.compile
        is_launched = keeps_random_states or options.precision == "fp16" or is_sharded
        return cls(options.flex_attention, options.compile, options.cuda_graphs and not is_launched)

    @property
    def name(self) -> str:
        """What is done, for tables: "compiled, replayed"."""
        names = ("" if self.flex else "dense masks", "compiled" if self.compiled else "not compiled")
        return ", ".join(name for name in (*names, "replayed" if self.recorded else "launched") if name)

    @property
    def settings(self) -> list[str]:
        """The settings that differ from the defaults."""
        return [f"{key}=false" for switch, key in SETTINGS.items() if not getattr(self, switch)]

    def includes(self, other: Way) -> bool:
        """Whether a fault of the other way is one of this way too: the same masks, and not more of the rest."""
        return self.flex == other.flex and self.compiled >= other.compiled and self.recorded >= other.recorded


ON_GPU = tuple(Way(*switches) for switches in product((True, False), repeat=3))
"""All ways on a GPU, the fastest first."""
ON_CPU = (Way(flex=False, compiled=False, recorded=True), Way(flex=False, compiled=False, recorded=False))
"""The ways without a GPU. Replaying only runs a pass again on the buffers of its capture."""
