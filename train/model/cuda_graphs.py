"""Forward and backward passes over packs as CUDA graphs: recorded once for each shape, then replayed.

Design: a pass over a pack is some thousand kernels, and a CPU takes 3 to 4 ms a layer to launch them, whatever the
pack's length; a small pack, or a small model, has the GPU waiting. A recorded pass is launched as one. It needs the
same shapes at the same addresses each time. So each shape has tensors that batches are copied into: images are filled
up with features that no token takes, places to predict from up to a power of two with ones that weigh nothing.
Gradients are added to tensors that stay. All graphs share one pool of memory, since they run one after the other.

The cost: a quarter of a second for each of some dozens of shapes (up to 8,192 tokens there are 47 lengths, most with
one or two numbers of places); a pool that nothing else can use until training ends; and gradients are exchanged between
processes after the last pass, not while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lookonce.errors import TrainingError
from lookonce.train.data.features import Batch
from lookonce.train.data.packing import padded_length

LEAST_TARGETS = 64
GRIDS = "image_grid_thw"
FEATURES = "pixel_values"
OF_IMAGES = (FEATURES, GRIDS)
OF_TARGETS = ("logits_to_keep", "targets", "weights")

Pass = Callable[[Batch], torch.Tensor]
"""Goes forward and backward over a batch, adds to the gradients, gives the loss."""
Shape = tuple[int, int, bool]
"""Tokens and places to predict from, padding included, and whether there are images."""
Replay = Callable[[], torch.Tensor]
Recorder = Callable[[Replay], Replay]
"""Records what a function does; what it gives does that again."""


def cuda_graphs() -> Recorder:
    """Records what a function does on the GPU; all recordings share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads, which read ahead and exchange gradients, may call what must not be called while this records.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return record


class RecordedPasses:
    """Passes over packs, each recorded when the first of its shapes comes."""

    def __init__(self, run: Pass, trained: Sequence[torch.Tensor], merge_size: int, recorder: Recorder) -> None:
        """`trained` are the weights that get gradients from `run`; an image of `merge_size` by `merge_size` patches is
        one token."""
        self._run, self._merge_size, self._record = run, merge_size, recorder
        self._gradients = [(weight, torch.zeros_like(weight)) for weight in trained]
        self._recorded: dict[Shape, tuple[Replay, Batch]] = {}
        self._features: torch.Tensor | None = None

    def begin_step(self) -> None:
        """Set gradients to zero, in the tensors that recorded passes add to."""
        torch._foreach_zero_([gradient for _, gradient in self._gradients])
        for weight, gradient in self._gradients:
            weight.grad = gradient

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Add a pack's gradients; gives its loss.

        Raises:
            TrainingError: its pass can not be recorded.
            torch.OutOfMemoryError: it does not fit.
        """
        replay, inputs = self.prepare(shape_of_batch(batch), batch)
        fill(inputs, batch)
        return replay().clone()

    def prepare(self, shape: Shape, like: Batch) -> tuple[Replay, Batch]:
        """Record a pass over packs of a shape, if none is yet; gives it, and the tensors that it reads.

        `like` is a batch of any length that has what such packs have. Recording reads no values.
        """
        if shape not in self._recorded:
            inputs = self._inputs(shape, like)
            self._recorded[shape] = self._recording(inputs), inputs
        return self._recorded[shape]

    def _recording(self, inputs: Batch) -> Replay:
        for weight, gradient in self._gradients:
            weight.grad = gradient
        try:
            return self._record(lambda: self._run(inputs))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if isinstance(error.__context__, torch.OutOfMemoryError):  # which a recording can not end well after
                raise error.__context__ from None
            raise TrainingError(
                f"a pass over a pack can not be recorded as a CUDA graph ({str(error).strip().splitlines()[0]}); train "
                "without recording: lookonce train RUN.yaml --resume --set train.cuda_graphs=false"
            ) from error

    def _inputs(self, shape: Shape, like: Batch) -> Batch:
        """Zeros, as large as packs of that shape."""
        length, num_targets, has_images = shape
        sizes = {name: num_targets if name in OF_TARGETS else length for name in like if name not in OF_IMAGES}
        inputs = {name: like[name].new_zeros(*like[name].shape[:-1], size) for name, size in sizes.items()}
        if has_images:
            inputs[FEATURES] = self._room_for_features(length, like[FEATURES])
            inputs[GRIDS] = torch.tensor([[1, self._merge_size, self._merge_size * length]])  # one image that fills it
        return inputs

    def _room_for_features(self, length: int, features: torch.Tensor) -> torch.Tensor:
        """The same for all lengths, since the longest come to some hundred megabytes."""
        if self._features is None or len(self._features) < length:
            self._features = features.new_zeros(length, *features.shape[1:])
        return self._features[:length]


def shape_of(num_tokens: int, num_targets: int, has_images: bool) -> Shape:
    """That of the recorded pass which serves such packs."""
    return padded_length(num_tokens), room_for(num_targets), has_images


def shape_of_batch(batch: Batch) -> Shape:
    return shape_of(batch["input_ids"].shape[1], batch["targets"].shape[1], FEATURES in batch)


def room_for(num_targets: int) -> int:
    """Places to predict from that so many are filled up to."""
    return max(1 << (num_targets - 1).bit_length(), LEAST_TARGETS)


def fill(inputs: Batch, batch: Batch) -> None:
    """Copy a batch into larger tensors; what is left there of another one counts nothing."""
    inputs["weights"].zero_()
    for name, tensor in batch.items():
        if name != GRIDS:
            inputs[name][tuple(slice(size) for size in tensor.shape)].copy_(tensor, non_blocking=True)
