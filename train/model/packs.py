"""Loss and gradients of packs: the mask, the exact loss, and CUDA graphs of forward and backward passes.

The CPU takes 3 to 4 ms per layer to launch the kernels of a pass, whatever the pack's length, so with a short pack or a
small model the GPU waits. A captured pass is launched as one. A replay needs the same shapes at the same addresses, so
each shape has input tensors that batches are copied into: images are padded with features that no token takes, and the
targets to a power of two with target weights of 0. All graphs share one memory pool.

A captured pass computes the loss and the gradients at once. The backward pass of the loss that `pack_loss` returns adds
the gradients to the weights' own, times the gradient of the loss, so a training loop is the same without capturing.

The cost: a quarter of a second to capture each of some dozens of shapes, when it first appears (up to 8,192 tokens
there are 47 lengths, most with one or two numbers of targets); a memory pool that nothing else can use until training
ends; a copy of the gradients; and gradients are exchanged between ranks after the last pass, not during it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.state import GradientState
from torch.nn.parallel import DistributedDataParallel

from lookonce.errors import TrainingError, UsageError
from lookonce.text import first_line
from lookonce.train.data.batches import Batch
from lookonce.train.data.packing import padded_length
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.load import base_model, is_sharded, without_ddp
from lookonce.train.model.loss import LOG_PROBS, MASK_KEY, REWARD_KEYS, RewardLoss, forward_loss

MIN_TARGETS = 64
GRIDS = "image_grid_thw"
FEATURES = "pixel_values"
IMAGE_KEYS = (FEATURES, GRIDS)
TARGET_KEYS = ("logits_to_keep", "targets", "weights", *REWARD_KEYS)
NUM_LAUNCHED = 2
"""Passes that are launched before others are captured: they compile the layers, for all lengths, which a capture
cannot."""

Forward = Callable[[Batch], torch.Tensor]
"""Computes the loss of a batch."""
Shape = tuple[int, int, bool]
"""Number of tokens and of targets, both with padding, and whether there are images."""
Replay = Callable[[], torch.Tensor]
"""Launches a captured pass and returns its loss."""
Capture = Callable[[Replay], Replay]
"""Captures what a function does on the GPU, and returns a function that does it again."""


@contextlib.contextmanager
def packed_attention(
    model: Any,
    *,
    compiled: bool = False,
    captured: bool = False,
    flex: bool = True,
    of_rewards: RewardLoss | None = None,
) -> Iterator[PackPasses]:
    """Within the block, the model uses the attention mask of packs, and trains on them as `lookonce train` does.

    With `compiled` its decoder layers are compiled, which takes up to a minute, and with `captured` its passes are
    replayed as CUDA graphs; both need a GPU. Captured passes do not work with DistributedDataParallel: with
    several processes, each calls `average_gradients` after the last pack of a step. `flex`: use FlexAttention on a GPU.
    `of_rewards` is the loss of packs with advantages. All changes are undone on exit. The model may be in
    DistributedDataParallel.

    Raises:
        ModelError: a layer does not use full attention, so it would mix the questions of a pack.
    """
    with training_on_packs(without_ddp(model), compiled=compiled):
        outer = _PASSES.get(_inner(model))
        passes = _PASSES[_inner(model)] = PackPasses(model, flex=flex, captured=captured, of_rewards=of_rewards)
        try:
            yield passes
        finally:
            if outer:  # within another block
                _PASSES[_inner(model)] = outer
            else:
                del _PASSES[_inner(model)]


def is_on_packs(model: Any) -> bool:
    return _inner(model) in _PASSES


def pack_loss(model: Any, pack: Mapping[str, Any]) -> torch.Tensor:
    """A pack's share of the loss of its step; summed over the step's packs, it is the stock model's loss of the step.

    With several processes, the share is multiplied by their number, because DistributedDataParallel averages gradients.
    `pack` comes from `DataCollatorForPacks`; its tensors are moved to the model's device. Call it within
    `packed_attention`. Into a pack with advantages it writes the log-probabilities of the targets.

    Raises:
        UsageError: the model is not within `packed_attention`; several processes train, and the packs are not divided
            among them or the gradients not averaged; or accelerate accumulates gradients, and would divide the loss.
    """
    if (num_steps := GradientState().num_steps) != 1:
        raise UsageError(
            f"accelerate has gradient_accumulation_steps={num_steps} and would divide the loss of a pack by it, but "
            "the losses of the packs of a step add up to that of the step; leave it at 1, set samples_per_step of "
            "PackBatchSampler instead, and step the optimizer where pack['ends_step'] is true"
        )
    num_ranks = _num_processes()
    if num_ranks != pack["num_ranks"]:
        raise UsageError(
            f"the packs are for {pack['num_ranks']} of {num_ranks} processes that train together; "
            "make PackBatchSampler(dataset) after Accelerator() or init_process_group(), or give it rank and num_ranks"
        )
    if num_ranks > 1:
        _check_gradients_are_averaged(model, num_ranks, pack["ends_step"])
    return share_of_loss(model, pack) * num_ranks


def _check_gradients_are_averaged(model: Any, num_ranks: int, ends_step: bool) -> None:
    if isinstance(model, DistributedDataParallel):
        return
    passes = _PASSES.get(_inner(model))
    if not is_sharded(model) and not (passes and passes.is_captured):
        raise UsageError(
            f"{num_ranks} processes train together, but nothing averages the gradients of {type(model).__name__}; "
            "write model = accelerator.prepare(model), on CPUs after Accelerator(cpu=True), or "
            "DistributedDataParallel(model)"
        )
    if passes and passes.needs_average:
        raise UsageError(
            "the gradients of the step before were not averaged over the processes; write "
            "lookonce.average_gradients(model) after the last pack of a step, before optimizer.step()"
        )
    if passes:
        passes.needs_average = ends_step


def average_gradients(model: Any) -> None:
    """Replace the gradients of trained weights by their means over all processes, in one message.

    Call it with captured passes, after the last pack of a step; DistributedDataParallel averages by itself.
    """
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(together)
    together /= torch.distributed.get_world_size()
    averages = torch.split(together, [gradient.numel() for gradient in gradients])
    # one launch and not one for each weight
    torch._foreach_copy_(gradients, [averaged.view_as(g) for g, averaged in zip(gradients, averages, strict=True)])
    if passes := _PASSES.get(_inner(model)):
        passes.needs_average = False


def _num_processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def share_of_loss(model: Any, pack: Mapping[str, Any]) -> torch.Tensor:
    """As `pack_loss`, but the share itself, whatever the number of processes."""
    device = next(model.parameters()).device
    batch = {  # the grids stay where they are: reading them on a GPU would wait for it
        name: value.to(device, non_blocking=True) if name != GRIDS else value for name, value in _tensors(pack).items()
    }
    if MASK_KEY not in batch:  # rows
        return forward_loss(model, batch, None)
    passes = _PASSES.get(_inner(model))
    if passes is None:
        raise UsageError(
            "the model is not in packed_attention, which gives it the mask of packs; write around the loop: with "
            "packed_attention(model): ..."
        )
    loss = passes.loss(model, batch, pack["tokens_per_pack"])
    if LOG_PROBS in batch:
        pack[LOG_PROBS].copy_(batch[LOG_PROBS])  # the same tensor, if the pack is on the device
    return loss


def _tensors(pack: Mapping[str, Any]) -> Batch:
    return {name: value for name, value in pack.items() if isinstance(value, torch.Tensor)}


def _inner(model: Any) -> Any:
    return base_model(without_ddp(model))


class PackPasses:
    """Passes of a model over packs: launched, or captured and replayed."""

    def __init__(
        self, model: Any, *, flex: bool = True, captured: bool = False, of_rewards: RewardLoss | None = None
    ) -> None:
        self._of_rewards = of_rewards
        self._flex, self.is_captured, self.needs_average = flex, captured, False
        self._merge_size = int(_inner(model).config.vision_config.spatial_merge_size) if captured else 0
        self._mask: PackMask | None = None
        self._num_launched = 0
        self._captured: CapturedPasses | None = None

    def loss(self, model: Any, batch: Batch, tokens_per_pack: int) -> torch.Tensor:
        """A pack's share of the loss of its step.

        The first passes that are to be captured are launched, as what is captured must be compiled.

        Raises:
            TrainingError: the pass cannot be captured.
            torch.OutOfMemoryError: the pass runs out of memory.
        """
        mask = self._mask_for(tokens_per_pack, batch["input_ids"].device)
        if not self.is_captured or not torch.is_grad_enabled():
            return forward_loss(model, batch, mask, self._of_rewards)
        passes = self._captured_passes(model, mask)
        if self._num_launched < NUM_LAUNCHED:
            self._num_launched += 1
            return passes.launched(batch)
        return passes(batch)

    def prepare(self, model: Any, shapes: Sequence[Shape], like: Mapping[str, Any]) -> None:
        """Capture the passes over packs of some shapes; `like` is one with images."""
        mask = self._mask_for(like["tokens_per_pack"], like["input_ids"].device)
        for shape in shapes:
            self._captured_passes(model, mask).prepare(shape, _tensors(like))

    def _mask_for(self, tokens_per_pack: int, device: torch.device) -> PackMask:
        """A mask for packs of a device, which is replaced only for longer ones: code is compiled for its buffers."""
        mask, max_tokens = _MASKS.get((device, self._flex)), padded_length(tokens_per_pack)
        if mask is None or max_tokens > mask.max_tokens:
            mask = _MASKS[device, self._flex] = PackMask(max_tokens, device, flex=self._flex)
        if mask is not self._mask:
            self._mask, self._captured = mask, None  # what is captured writes to the buffers of the mask before
        return mask

    def _captured_passes(self, model: Any, mask: PackMask) -> CapturedPasses:
        if isinstance(model, DistributedDataParallel):
            raise UsageError(
                "DistributedDataParallel exchanges gradients during a pass, which cannot be captured; leave "
                "`captured` out, or give pack_loss the model itself and average the gradients after each step"
            )
        if self._captured is None:
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            new_capture = cuda_graph_capture if trained[0].is_cuda else lambda: run_again
            self._captured = CapturedPasses(
                lambda batch: forward_loss(model, batch, mask, self._of_rewards), trained, self._merge_size, new_capture
            )
        return self._captured


_MASKS: dict[tuple[torch.device, bool], PackMask] = {}
_PASSES: WeakKeyDictionary[Any, PackPasses] = WeakKeyDictionary()
"""By model, within `packed_attention`."""


def forget_masks() -> None:
    """Forget the masks that compiled code writes to, once that is discarded."""
    _MASKS.clear()


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


run_again: Capture = lambda function: function  # noqa: E731
"""Captures nothing: without a GPU, passes run again on the input tensors of the capture."""


class CapturedPasses:
    """Passes over packs, each captured when a pack has its shape for the first time."""

    def __init__(
        self, forward: Forward, trained: Sequence[torch.Tensor], merge_size: int, new_capture: Callable[[], Capture]
    ) -> None:
        """`trained` are the weights that get gradients; `merge_size` squared patches are one token; `new_capture` gives
        a `Capture` with memory of its own."""
        self._forward, self._trained, self._merge_size, self._new_capture = forward, trained, merge_size, new_capture
        self._gradients = [torch.zeros_like(weight) for weight in trained]
        """The gradients of the last pass."""
        self._number = 0
        """The number of the last pass; another one once its gradients are used."""
        self._captured: dict[Shape, tuple[Replay, Batch, list[int]]] = {}
        """By shape: how to replay a pass, its inputs, and the indices of the weights that it has gradients of."""
        self._used: list[int] = []
        self._features: torch.Tensor | None = None
        """One buffer for all lengths, since the longest takes some hundred megabytes."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The loss of a pack; its backward pass, which must come before the next pack, adds the gradients."""
        replay, inputs, self._used = self.prepare(shape_of_batch(batch), batch)
        copy_into(inputs, batch)
        loss = self._with_gradients(replay())
        if LOG_PROBS in batch:
            batch[LOG_PROBS].copy_(inputs[LOG_PROBS][:, : batch[LOG_PROBS].shape[1]])
        return loss

    def launched(self, batch: Batch) -> torch.Tensor:
        """The same without capturing.

        Its gradients are computed at once too. A graph of autograd that outlives its pass would tie the weights to the
        stream that it ran on, and no pass could be captured.
        """
        used: list[int] = []
        loss = self._pass(batch, used)
        self._used = used
        return self._with_gradients(loss)

    def _with_gradients(self, loss: torch.Tensor) -> torch.Tensor:
        self._number += 1
        replayed: Any = _Replayed
        result: torch.Tensor = replayed.apply(torch.zeros_like(loss, requires_grad=True), loss, self, self._number)
        return result

    def prepare(self, shape: Shape, like: Batch) -> tuple[Replay, Batch, list[int]]:
        """Capture a pass over packs of a shape unless that is done.

        `like` is a batch of any length with the same keys. Capturing reads no values.
        """
        if shape not in self._captured:
            if shape[0] > max((length for length, _, _ in self._captured), default=0):
                self._start_over()
            inputs = self._inputs(shape, like)
            used: list[int] = []
            self._captured[shape] = self._captured_pass(inputs, used), inputs, used
        return self._captured[shape]

    def _start_over(self) -> None:
        """Forget all captured passes: shorter ones share the memory of the longest only if that is captured first."""
        self._captured.clear()
        self._capture = self._new_capture()  # memory of which a tensor is still in use takes no other capture
        if any(weight.is_cuda for weight in self._trained):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def add_gradients(self, number: int, times: torch.Tensor) -> None:
        """Add the gradients of a pass to those of the weights, multiplied with the gradient of its loss.

        Raises:
            UsageError: the gradients of this pass are not there any more.
        """
        if number != self._number:
            raise UsageError(
                "the gradients of a captured pass are gone after the next pack, and once they are used; call backward "
                "once for each loss of pack_loss, before the next, or leave `captured` out"
            )
        self._number += 1
        pairs = [(self._trained[index], self._gradients[index]) for index in self._used]
        if later := [(weight.grad, gradient) for weight, gradient in pairs if weight.grad is not None]:
            torch._foreach_mul_([gradient for _, gradient in later], times)
            torch._foreach_add_([total for total, _ in later], [gradient for _, gradient in later])
        if first := [(weight, gradient) for weight, gradient in pairs if weight.grad is None]:
            products = torch._foreach_mul([gradient for _, gradient in first], times)
            for (weight, _), product in zip(first, products, strict=True):
                weight.grad = product

    def _captured_pass(self, inputs: Batch, used: list[int]) -> Replay:
        torch.clear_autocast_cache()  # what is captured must cast the weights itself
        try:
            return self._capture(lambda: self._pass(inputs, used))
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
        finally:
            torch.clear_autocast_cache()

    def _pass(self, inputs: Batch, used: list[int]) -> torch.Tensor:
        """Forward and backward; puts the gradients into their tensors, and the indices of those that are there."""
        with torch.enable_grad():
            loss = self._forward(inputs)
            with torch.autocast(loss.device.type, enabled=False):  # as outside of the block that the forward pass is in
                gradients = torch.autograd.grad(loss, self._trained, allow_unused=True)
        used[:] = [index for index, new in enumerate(gradients) if new is not None]
        torch._foreach_copy_([self._gradients[index] for index in used], [gradients[index] for index in used])
        return loss.detach()

    def _inputs(self, shape: Shape, like: Batch) -> Batch:
        """Tensors of zeros for packs of a shape."""
        length, num_targets, has_images = shape
        sizes = {name: num_targets if name in TARGET_KEYS else length for name in like if name not in IMAGE_KEYS}
        inputs = {name: like[name].new_zeros(*like[name].shape[:-1], size) for name, size in sizes.items()}
        if has_images:
            if self._features is None or len(self._features) < length:
                self._features = like[FEATURES].new_zeros(length, *like[FEATURES].shape[1:])
            inputs[FEATURES] = self._features[:length]
            inputs[GRIDS] = torch.tensor([[1, self._merge_size, self._merge_size * length]])  # one image of all tokens
        return inputs


class _Replayed(torch.autograd.Function):
    """The loss of a replayed pass, in whose backward pass its gradients are added to the weights' own."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, passes: CapturedPasses, number: int
    ) -> torch.Tensor:
        ctx.passes, ctx.number = passes, number
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.passes.add_gradients(ctx.number, gradient)
        return None, None, None, None


def shape_of(num_tokens: int, num_targets: int, has_images: bool) -> Shape:
    """The shape of the captured pass that serves such packs; targets are padded to a power of two."""
    return padded_length(num_tokens), max(1 << (num_targets - 1).bit_length(), MIN_TARGETS), has_images


def shape_of_batch(batch: Batch) -> Shape:
    return shape_of(batch["input_ids"].shape[1], batch["targets"].shape[1], FEATURES in batch)


def copy_into(inputs: Batch, batch: Batch) -> None:
    """Copy a batch into larger tensors. What remains there of an earlier batch has target weights of 0."""
    inputs["weights"].zero_()
    for name, tensor in batch.items():
        if name != GRIDS:
            inputs[name][tuple(slice(size) for size in tensor.shape)].copy_(tensor, non_blocking=True)
