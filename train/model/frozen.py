"""How the weights that are not trained are kept: in the precision of training, or quantised (`train.frozen`).

`loading_options` are arguments of `from_pretrained`, `finish` does what is left to do with a model that was loaded with
them, and `mismatched` checks its shapes. `load` knows nothing else of it.

fp8 (e4m3) is for GPUs since Ada and Hopper, which multiply twice as fast in it (https://arxiv.org/abs/2209.05433). Both
products of a frozen layer are computed in fp8, that of the forward pass and that which gives the gradient of its input.
Weights have a scale for each row of the product's result, inputs and gradients one for each token. So a token's result
does not depend on the tokens beside it, and packs equal rows up to rounding. LoRA's products stay in the precision of
training. The two products need the weight in two layouts, so weights take as much memory as in bf16. Rounding to 4
significant bits changes what is learned a little; adapters are evaluated with weights that are not rounded.

int8 and nf4 (https://arxiv.org/abs/2305.14314) are stock QLoRA: the same `BitsAndBytesConfig` gives the same weights in
any program. Only the products of the decoder layers are quantised. A model is loaded on the device where it will run,
one tensor after another, so a GPU never holds all weights as they are in the files.

nf4 rounds weights alone. int8 rounds the inputs of each product too, each token's by its own largest value.
bitsandbytes' usual threshold, above which inputs are not rounded, is off: it looks for large values among all tokens
together. In int8, computations that differ in the last bit, as packs and rows do, may round an input to neighbouring
values. (In training on a CPU, bitsandbytes does not round inputs.)
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from lookonce.environment import best_device
from lookonce.errors import UsageError
from lookonce.families.lookup import FAMILIES
from lookonce.run.config import RunFile
from lookonce.run.sections import UNQUANTISED

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
NOT_QUANTISED = ("lm_head", *sorted({f"model.{family.tower}" for family in FAMILIES.values()}))
"""Modules that keep their precision: the last product, and the tower, in models that have it."""
FP8_CAPABILITY = (8, 9)
"""CUDA's compute capability of the first GPUs that multiply in fp8."""
QUANTISED: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0, "llm_int8_skip_modules": [*NOT_QUANTISED]},
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": [*NOT_QUANTISED],
    },
}
"""The values of `train.frozen` that bitsandbytes computes, with arguments of `BitsAndBytesConfig`."""


class Fp8Linear(nn.Linear):
    """A frozen layer whose products are computed in fp8; for PEFT it is a Linear."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach().to(device)
        rows, row_scales = rounded(weight)
        columns, column_scales = rounded(weight.T.contiguous())
        for name, tensor in (("rows", rows), ("columns", columns)):  # as bytes: PEFT takes the dtype of float weights
            self.register_buffer(name, tensor.view(torch.uint8), persistent=False)
        self.register_buffer("row_scales", row_scales.T, persistent=False)
        self.register_buffer("column_scales", column_scales.T, persistent=False)
        self.register_parameter("bias", layer.bias)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The rounded weight as bytes, `[out, in]`."""
        return self.rows  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: Any = _Product
        result: torch.Tensor = product.apply(x, self.rows, self.row_scales, self.columns, self.column_scales)
        return result if self.bias is None else result + self.bias.to(result.dtype)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[N, K]` in fp8, and a float32 scale for each row, `[N, 1]`."""
    scale = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (x.float() / scale).to(FP8), scale


class _Product(torch.autograd.Function):
    """`x` times a weight, and its gradient times the same weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: Any, row_scales: Any, columns: Any, column_scales: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(columns, column_scales)
        return _product(x, rows, row_scales)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _product(gradient, *ctx.saved_tensors), None, None, None, None


def _product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`x` `[..., K]` times the transpose of `weight` `[N, K]`, given as bytes with scales `[1, N]`."""
    values, x_scales = rounded(x.reshape(-1, x.shape[-1]))
    product = torch._scaled_mm(
        values, weight.view(FP8).T, x_scales, scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return product.to(x.dtype).view(*x.shape[:-1], -1)


def loading_options(frozen: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` for `train.frozen`, with products in `dtype`; raises as `check_frozen` does."""
    check_frozen(frozen)
    if frozen not in QUANTISED:
        return {}
    compute: dict[str, Any] = {"bnb_4bit_compute_dtype": dtype} if frozen == "nf4" else {}
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # notes each cast of int8's inputs
    config: Any = BitsAndBytesConfig
    return {"quantization_config": config(**QUANTISED[frozen], **compute)}


def finish(model: Any, frozen: str) -> None:
    """Do what is left to do with a model that was loaded with these arguments."""
    if frozen == "fp8":
        _to_fp8(model.model.language_model.layers)
    if frozen not in QUANTISED:
        return
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for module in model.modules():
        if isinstance(module, Linear4bit):
            # On some CPUs an evaluation would round the scales again, in place, and training would use these.
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, Linear8bitLt):
            module.init_8bit_state()  # else in the first forward pass, and layers would be compiled twice


def _to_fp8(layers: nn.Module) -> None:
    """Replace the products of the decoder layers, one after another, on the device where the model will run."""
    for name, module in [*layers.named_modules()]:
        if type(module) is nn.Linear:
            parent, _, child = name.rpartition(".")
            setattr(layers.get_submodule(parent), child, Fp8Linear(module, best_device()))


def mismatched(model: Any, frozen: str) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
    """The tensors that bitsandbytes quantised and that had another shape in their files: name, shape there and here."""
    if frozen not in QUANTISED:
        return
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name, module in model.named_modules():
        if isinstance(module, (Linear4bit, Linear8bitLt)):
            weight, shape = module.weight, (module.out_features, module.in_features)
            actual = weight.quant_state.shape if isinstance(module, Linear4bit) else weight.shape
            if tuple(actual) != shape:
                yield f"{name}.weight", actual, shape


def check_frozen(frozen: str, key: str = "frozen") -> None:
    """Check that what a value of a run file's `key` needs is here.

    Raises:
        UsageError: a package is not installed, or the GPU cannot multiply in fp8; says what to do.
    """
    if frozen == "fp8" and torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise UsageError(
            f"{key}: fp8 needs a GPU that multiplies in fp8 (Ada, Hopper or later), and "
            f"{torch.cuda.get_device_name()} cannot; set {key}: {UNQUANTISED}, int8 or nf4"
        )
    if frozen in QUANTISED and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(
            f"{key}: {frozen} needs bitsandbytes, which is not installed; install it with: "
            f"pip install 'lookonce[qlora]', or set {key}: {UNQUANTISED}"
        )


def frozen_of_answers(run: RunFile) -> str:
    """How the frozen weights are kept when answers are computed after training."""
    return UNQUANTISED if run.train.frozen == "fp8" else run.train.frozen


def model_settings(run: RunFile) -> list[str]:
    """The settings on which the numbers of a loaded model depend, for hashes of what answers depend on."""
    frozen = frozen_of_answers(run)
    return [run.train.precision, run.model.attention, *([] if frozen == UNQUANTISED else [frozen])]
