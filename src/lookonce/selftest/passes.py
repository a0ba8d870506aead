"""Loss and gradients of packs, and of the rows of stock training.

Design: packs take the path of training, down to CUDA graphs. Rows take transformers' own path: its masks, its
positions, its loss over whole rows of labels. The two share the model's layers and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lookonce.train.data.batches import Batch
from lookonce.train.model.attention import PackMask
from lookonce.train.model.cuda_graphs import Capture, CapturedPasses, cuda_graph_capture
from lookonce.train.model.load import text_model
from lookonce.train.model.loss import forward_loss

STOCK_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's attention without cuDNN's, which takes a second to prepare for each shape."""


@dataclass
class Outcome:
    """Loss and gradient of some passes."""

    loss: torch.Tensor
    gradient: torch.Tensor

    def distance(self, other: Outcome) -> tuple[float, float]:
        """Relative distances of loss and gradient."""
        pairs = ((self.loss, other.loss), (self.gradient, other.gradient))
        loss, gradient = (float((found - expected).norm() / expected.norm()) for found, expected in pairs)
        return loss, gradient


class Passes:
    """Forward and backward passes of a model in one precision, with autocast as in training."""

    def __init__(
        self, model: Any, dtype: torch.dtype, max_tokens: int, device: torch.device, *, flex: bool = True
    ) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.mask = PackMask(max_tokens, device, flex=flex)

    @property
    def trained(self) -> list[torch.Tensor]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def run(self, batch: Batch) -> torch.Tensor:
        """Run a pack, or rows with target weights, forward and backward; returns the loss."""
        with self._autocast():
            loss = forward_loss(self.model, batch, self.mask)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def outcome(self, batches: Iterable[Batch]) -> Outcome:
        """The outcome of some packs together."""
        total = torch.zeros((), device=self.device)
        for batch in batches:
            total += self.run(batch)
        return self.taken(total)

    def stock(self, rows: Iterable[Batch], attention: str = "sdpa") -> Outcome:
        """The outcome of stock training on some rows, with one of transformers' attentions."""
        total = torch.zeros((), device=self.device)
        with self._attention(attention):
            for batch in rows:
                with self._autocast():
                    loss: torch.Tensor = self.model(**batch, use_cache=False).loss
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return self.taken(total)

    def captured(self, merge_size: int) -> CapturedPasses:
        """Passes that are captured and replayed; without a GPU they run again on the buffers of the capture."""
        capture = cuda_graph_capture() if self.device.type == "cuda" else _run_again
        return CapturedPasses(self.run, self.trained, merge_size, capture)

    def replayed(self, captured: CapturedPasses, batch: Batch) -> Outcome:
        """The outcome of one pack in a captured pass."""
        captured.begin_step()
        return self.taken(captured(batch))

    def taken(self, loss: torch.Tensor) -> Outcome:
        """The loss with the gradients, which are then cleared."""
        gradient = torch.cat([weight.grad.flatten().double() for weight in self.trained if weight.grad is not None])
        self.model.zero_grad(set_to_none=True)
        return Outcome(loss.double(), gradient)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @contextlib.contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        config = text_model(self.model).config
        before, config._attn_implementation = config._attn_implementation, name
        try:
            with sdpa_kernel(STOCK_KERNELS):
                yield
        finally:
            config._attn_implementation = before


_run_again: Capture = lambda function: function  # noqa: E731


@contextlib.contextmanager
def ieee_float32() -> Iterator[None]:
    """Multiply float32 matrices without TensorFloat-32, which would hide small faults."""
    settings: tuple[Any, ...] = (torch.backends, torch.backends.cuda.matmul)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
