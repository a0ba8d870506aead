"""Small models whose layers have LoRA adapters that do something, and what they compute."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import pad, silu


class Attention(nn.Module):
    """Calls its layers as stock attention does, with biases, but adds up what they give."""

    def __init__(self, width: int, num_queries: int, num_keys: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, num_queries)
        self.k_proj = nn.Linear(width, num_keys)
        self.v_proj = nn.Linear(width, num_keys)
        self.o_proj = nn.Linear(num_queries, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        missing = queries.shape[-1] - keys.shape[-1]
        attended = queries.tanh() + pad(keys.sin() * values, (0, missing))
        result: torch.Tensor = self.o_proj(attended.to(x.dtype))
        return result


class Mlp(nn.Module):
    """A gated MLP with the layers of stock ones."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """A decoder layer, but that tokens do not see each other."""

    def __init__(self, width: int = 8, num_queries: int = 16, num_keys: int = 4, inner: int = 24) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(width, num_queries, num_keys), Mlp(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(x.tanh())
        result: torch.Tensor = x + self.mlp(x.sin())
        return result


def adapted(*layers: nn.Module, **options: Any) -> Any:
    """PEFT's model of the layers, one after the other, with weights that are the same each time."""
    torch.manual_seed(0)
    for module in (module for layer in layers for module in layer.modules()):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    chosen: dict[str, Any] = {"target_modules": "all-linear", "r": 4, "lora_alpha": 10} | options
    config = LoraConfig(**chosen)
    model = get_peft_model(nn.Sequential(*layers), config)
    for weight in model.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight, std=0.3 * weight.shape[-1] ** -0.5)
    return model


def computed(call: Any, model: Any, x: torch.Tensor, gradient: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The output of a call with `x`, and the gradients of `x` and of the model's adapters."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    x = x.detach().requires_grad_()
    output = call(x)
    gradient = torch.ones_like(output) if gradient is None else gradient
    return [output.detach(), *torch.autograd.grad(output, [x, *trained], gradient)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    """Check that tensors differ by no more than `tolerance`, relative to their norms."""
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()
