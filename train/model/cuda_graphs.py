"""CUDA graphs: forward and backward passes over packs, captured once per shape and then replayed.

Design: a pass over a pack is some thousand kernels. The CPU takes 3 to 4 ms per layer to launch them, whatever the
pack's length, so with a short pack or a small model the GPU waits. A captured pass is launched as one. A replay needs
the same shapes at the same addresses, so each shape has input tensors that batches are copied into: images are padded
with features that no token takes, and the targets are padded to a power of two with target weights of 0. Gradients are
added to tensors that stay in place. All graphs share one memory pool, since they are replayed one after another.

The cost: a quarter of a second to capture each of some dozens of shapes, when it first appears (up to 8,192 tokens
there are 47 lengths, most with one or two numbers of targets); a memory pool that nothing else can use until training
ends; and gradients are exchanged between ranks after the last pass, not during it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lookonce.errors import TrainingError
from lookonce.text import first_line
from lookonce.train.data.batches import Batch
from lookonce.train.data.packing import padded_length

MIN_TARGETS = 64
GRIDS = "image_grid_thw"
FEATURES = "pixel_values"
IMAGE_KEYS = (FEATURES, GRIDS)
TARGET_KEYS = ("logits_to_keep", "targets", "weights")

Pass = Callable[[Batch], torch.Tensor]
"""Runs forward and backward over a batch, adds to the gradients and returns the loss."""
Shape = tuple[int, int, bool]
"""Number of tokens and of targets, both with padding, and whether there are images."""
Replay = Callable[[], torch.Tensor]
"""Launches a captured pass and returns its loss."""
Capture = Callable[[Replay], Replay]
"""Captures what a function does on the GPU, and returns a function that does it again."""


def cuda_graph_capture() -> Capture:
    """A function that captures CUDA graphs, which share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Threads that prefetch or exchange gradients may make calls that are forbidden in the capturing thread.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return capture


class CapturedPasses:
    """Passes over packs, each captured when a pack has its shape for the first time."""

    def __init__(
        self, forward_backward: Pass, trained: Sequence[torch.Tensor], merge_size: int, capture: Capture
    ) -> None:
        """`trained` are the weights that get gradients; `merge_size` squared patches are one token."""
        self._forward_backward, self._merge_size, self._capture = forward_backward, merge_size, capture
        self._gradients = [(weight, torch.zeros_like(weight)) for weight in trained]
        self._captured: dict[Shape, tuple[Replay, Batch]] = {}
        self._features: torch.Tensor | None = None

    def begin_step(self) -> None:
        """Set gradients to zero, in the tensors that captured passes add to."""
        torch._foreach_zero_([gradient for _, gradient in self._gradients])
        for weight, gradient in self._gradients:
            weight.grad = gradient

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Add a pack's gradients and return its loss.

        Raises:
            TrainingError: the pass cannot be captured.
            torch.OutOfMemoryError: the pass runs out of memory.
        """
        replay, inputs = self.prepare(shape_of_batch(batch), batch)
        copy_into(inputs, batch)
        return replay().clone()

    def prepare(self, shape: Shape, like: Batch) -> tuple[Replay, Batch]:
        """Capture a pass over packs of a shape unless that is done; returns its replay and its input tensors.

        `like` is a batch of any length with the same keys. Capturing reads no values.
        """
        if shape not in self._captured:
            inputs = self._inputs(shape, like)
            self._captured[shape] = self._captured_pass(inputs), inputs
        return self._captured[shape]

    def _captured_pass(self, inputs: Batch) -> Replay:
        try:
            return self._capture(lambda: self._add_gradients(inputs))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # after any error, ending the capture fails too
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise TrainingError(
                f"a pass over a pack cannot be captured as a CUDA graph ({first_line(cause)}); train without CUDA "
                "graphs: lookonce train RUN.yaml --resume --set train.cuda_graphs=false"
            ) from error

    def _add_gradients(self, inputs: Batch) -> torch.Tensor:
        """A pass whose gradients are added to those of the step together, in a few kernels instead of one a weight."""
        for weight, _ in self._gradients:
            weight.grad = None
        loss = self._forward_backward(inputs)
        found = [(gradient, weight.grad) for weight, gradient in self._gradients if weight.grad is not None]
        torch._foreach_add_([gradient for gradient, _ in found], [new for _, new in found])
        for weight, gradient in self._gradients:
            weight.grad = gradient
        return loss

    def _inputs(self, shape: Shape, like: Batch) -> Batch:
        """Tensors of zeros for packs of a shape."""
        length, num_targets, has_images = shape
        sizes = {name: num_targets if name in TARGET_KEYS else length for name in like if name not in IMAGE_KEYS}
        inputs = {name: like[name].new_zeros(*like[name].shape[:-1], size) for name, size in sizes.items()}
        if has_images:
            inputs[FEATURES] = self._feature_buffer(length, like[FEATURES])
            inputs[GRIDS] = torch.tensor([[1, self._merge_size, self._merge_size * length]])  # one image of all tokens
        return inputs

    def _feature_buffer(self, length: int, features: torch.Tensor) -> torch.Tensor:
        """One buffer for all lengths, since the longest takes some hundred megabytes."""
        if self._features is None or len(self._features) < length:
            self._features = features.new_zeros(length, *features.shape[1:])
        return self._features[:length]


def shape_of(num_tokens: int, num_targets: int, has_images: bool) -> Shape:
    """The shape of the captured pass that serves such packs."""
    return padded_length(num_tokens), padded_num_targets(num_targets), has_images


def shape_of_batch(batch: Batch) -> Shape:
    return shape_of(batch["input_ids"].shape[1], batch["targets"].shape[1], FEATURES in batch)


def padded_num_targets(num_targets: int) -> int:
    """The number of targets that a pack is padded to: a power of two."""
    return max(1 << (num_targets - 1).bit_length(), MIN_TARGETS)


def copy_into(inputs: Batch, batch: Batch) -> None:
    """Copy a batch into larger tensors. What remains there of an earlier batch has target weights of 0."""
    inputs["weights"].zero_()
    for name, tensor in batch.items():
        if name != GRIDS:
            inputs[name][tuple(slice(size) for size in tensor.shape)].copy_(tensor, non_blocking=True)
