"""The vision tower alone: built from its own tensors, run on patches, its outputs stacked level by level.

Level 0 is the merged output, which replaces the image tokens' embeddings; levels 1.. are DeepStack's, added in the
first layers of the language model (https://arxiv.org/abs/2406.04334). The tower computes in the dtype that is stored
(in bfloat16 for fp8), so a bfloat16 cache holds exactly what a bfloat16 model would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lookonce.cache.constants import Grid
from lookonce.cache.model.fast_tower import FastTower
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.environment import limit_cpu_threads
from lookonce.errors import ModelError

TOKENS_PER_TOWER_BATCH = 8192
"""The most image tokens of a tower batch on a GPU."""


class Tower:
    """A vision tower ready to encode."""

    def __init__(
        self,
        model_folder: ModelFolder,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        fast: bool | None = None,
    ) -> None:
        """Build the tower from the tensors of the model folder.

        `fast` replaces modules by faster ones that round differently (fast_tower.py). It is the
        default on GPUs only, so features computed on a CPU have the bits of the stock tower.

        Raises:
            ModelError: the tensors do not fit the configuration.
        """
        limit_cpu_threads(model_folder.folder)
        self.dtype, self.device = dtype, torch.device(device)
        self.family, self.config = model_folder.family, model_folder.vision_config
        self.merge_size: int = self.config.spatial_merge_size
        self.tokens_per_tower_batch = TOKENS_PER_TOWER_BATCH if self.device.type == "cuda" else 1
        """The most image tokens of a tower batch; a larger image is a batch by itself. On a CPU every image is."""
        self.module = _build(model_folder, dtype).to(self.device)
        fast = self.device.type == "cuda" if fast is None else fast
        self._run = FastTower(self.module) if fast else self._run_stock

    @torch.inference_mode()
    def encode(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """The features of a tower batch, image after image, `[num_tokens, num_levels, hidden]`, on the tower's device.

        `patches` is `[sum of t * h * w, patch_dim]`, `grids` has each image's (t, h, w). An image has
        t * h * w / merge_size**2 tokens.
        """
        output = self._run(patches.to(self.device, self.dtype), grids)
        deepstack = output.deepstack_features if self.family.has_deepstack else ()
        return torch.stack([output.pooler_output, *deepstack], dim=1)

    def _run_stock(self, patches: torch.Tensor, grids: Sequence[Grid]) -> Any:
        return self.module(patches, grid_thw=torch.tensor(grids, device=self.device), return_dict=True)

    def flop(self, num_tokens: int) -> float:
        """FLOPs for an image of `num_tokens` tokens: matrix products and attention, two per multiply-add.

        Attention counts as if each patch attended to its whole image, also in blocks with windows.
        """
        num_patches, parameters = num_tokens * self.merge_size**2, self.module.named_parameters()
        weights = [(name, weight.numel()) for name, weight in parameters if weight.ndim > 1 and "pos_embed" not in name]
        of_token = sum(number for name, number in weights if "merger" in name)
        of_patch = sum(number for _, number in weights) - of_token
        attention = self.config.depth * 2 * num_patches * len(self.module.patch_embed.proj.weight)
        return float(2 * (num_patches * (of_patch + attention) + num_tokens * of_token))


def _build(model_folder: ModelFolder, dtype: torch.dtype) -> Any:
    config = model_folder.vision_config
    tensors = dict(model_folder.tower_tensors())
    tower_class = model_folder.family.load(model_folder.family.tower_class)
    module, loading = tower_class.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation="sdpa",
        ignore_mismatched_sizes=True,  # reported below
        output_loading_info=True,
    )
    problems = [*loading["missing_keys"], *loading["unexpected_keys"], *loading["mismatched_keys"]]
    if problems:
        raise ModelError(
            f"the vision tower in {model_folder.folder} does not fit its configuration: "
            f"{len(problems)} tensors are missing, unknown or of another shape, for example {problems[0]}"
        )
    return module.eval().requires_grad_(False)
