"""Passes of the model over prompts and growing answers, which share a buffer of keys and values.

transformers' layers are used unchanged; its AttentionInterface
(https://huggingface.co/docs/transformers/attention_interface) calls the functions of this module. A pack of prompts
attends to itself alone, as in training. A thread makes packs ahead of their passes and across batches.

One token of each growing answer attends to the whole buffer, under the rule of training with slots for indices. With a
dense mask, computed for each pass, answers that have ended leave the batch: that suits a CPU and small batches.

On a GPU the mask is by rows (FlexAttention). The branches of an image are spread over rows of their own, in blocks. So
a block of rows reads the keys of one image only, and the whole GPU takes part. All query heads that read the same key
head lie side by side in a block, which reads its keys once for all of them. The price is rows that stay empty. All
tensors have one size for all batches, so a pass is captured once as a CUDA graph and replayed for every token: to
launch its thousands of kernels takes the CPU longer than the GPU needs for them. Branches that have ended are computed
until the batch ends.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lookonce.eval.decoding.batches import PADDING, UNUSED, BatchLayout, Branches, Room, Spans, state_rows
from lookonce.eval.decoding.buffers import Continued, KeyValues, OfPrompts, keep
from lookonce.eval.decoding.sampling import Chooser
from lookonce.train.data.batches import Batch, FeatureSource, PackCollator, Prefetcher, image_inputs
from lookonce.train.data.packing import BLOCK, padded_length
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model.attention import WHOLE_BLOCKS, PackMask, attends, shared_prefix_attention
from lookonce.train.model.compile import other_attention, training_on_packs
from lookonce.train.model.linear_attention import InPack, masks_with
from lookonce.train.model.load import text_model
from lookonce.train.model.loss import MASK_KEY
from lookonce.train.model.packs import Capture

PROMPTS = "shared_prefix_prompts"
STEPS = "shared_prefix_steps"
"""Names of these attention implementations in transformers."""
QUERIES = 64
"""Queries in a block: rows times the query heads that read the same key head, which are filled up to a power of 2."""
OPTIONS = WHOLE_BLOCKS | {"BACKEND": "TRITON", "BLOCK_M": QUERIES, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
"""FlexAttention's options. Larger blocks, and its own choice of options, took up to 1.8 times as long on an H200."""


def prompt_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, slots: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """For AttentionInterface: a pack of prompts attends to itself; its tokens have `slots` `[L]`."""
    keep(module, key, value, slots)
    return shared_prefix_attention(module, query, key, value, mask, **options)


def step_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, slots: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """For AttentionInterface: a token of each answer attends to the buffers; the tokens have `slots` `[N]`."""
    keep(module, key, value, slots)
    attend = row_attention if isinstance(mask, BlockMask) else shared_prefix_attention
    return attend(module, query, module.kept_keys, module.kept_values, mask, **options)


def row_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, **options: Any
) -> tuple[torch.Tensor, None]:
    """FlexAttention of the queries of branches `[1, heads, N, size]`, in the `rows` `[N]` of the mask."""
    rows, num_heads, size = options["rows"], key.shape[1], query.shape[3]
    heads = query.shape[1] // num_heads
    heads_of_row = QUERIES // rows_of_block(module.config)
    query = query.to(key.dtype)
    num_rows = mask.kv_num_blocks.shape[-1] * rows_of_block(module.config)
    spread = query.new_zeros(num_heads, num_rows, heads_of_row, size)
    spread[:, rows, :heads] = query.view(num_heads, heads, -1, size).transpose(1, 2)
    queries = spread.view(1, num_heads, -1, size)
    # With the sizes of tensors: for other numbers a compiled pass would be compiled again.
    lengths = queries.shape[2], key.shape[2]
    mask = _block_mask(lengths, mask.kv_num_blocks, mask.kv_indices, mask.mask_mod)
    attended = _flex(queries, key, value, mask, options.get("scaling"))
    of_branches = attended.view(num_heads, -1, heads_of_row, size)[:, rows, :heads]
    return of_branches.permute(1, 0, 2, 3).reshape(1, len(rows), -1, size), None


def _block_mask(lengths: tuple[int, int], num_keys: torch.Tensor, keys: torch.Tensor, attends: Any) -> BlockMask:
    """A mask whose rows read some blocks of keys: none is attended to as a whole, and there are no gradients."""
    absent = (None, None)
    return BlockMask(lengths, num_keys, keys, *absent, *absent, *absent, (QUERIES, BLOCK), attends)


def rows_of_block(config: Any) -> int:
    """The rows of a block, for transformers' `config` of a language model."""
    heads = int(config.num_attention_heads // config.num_key_value_heads)
    return QUERIES >> (heads - 1).bit_length()


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: Any) -> torch.Tensor:
    if query.device.type != "cuda":
        written_out: torch.Tensor = flex_attention(query, key, value, block_mask=mask, scale=scale)
        return written_out
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    output: torch.Tensor = attend(query, key, value, block_mask=mask, scale=scale, kernel_options=OPTIONS)
    return output


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention, dynamic=False)


for name, function in ((PROMPTS, prompt_attention), (STEPS, step_attention)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


@contextlib.contextmanager
def inference(model: Any, dtype: torch.dtype, keys: KeyValues, *, compiled: bool = False) -> Iterator[None]:
    """Passes without gradients, under autocast to `dtype` unless that is float32, and with `compiled` decoder layers.

    Autocast keeps no casts of weights: they would be freed at the end, and captured passes would read them later.
    """
    is_on = dtype != torch.float32
    autocast = torch.autocast(model.device.type, dtype, enabled=is_on, cache_enabled=False)
    on_packs = training_on_packs(model, compiled=compiled, attention=PROMPTS)
    with torch.inference_mode(), autocast, on_packs, keys.attached():
        yield


NUM_AHEAD = 2
"""Packs that are made before they are asked for."""
KEPT = ("input_ids", "position_ids", MASK_KEY)
"""What passes need of a collated pack."""
STATE_ROWS = "state_rows"
"""The row of each answer's state."""


class Prompts:
    """Computes the prompts of batches with a model, whose attention writes keys and values to their slots."""

    def __init__(
        self, model: Any, chat: ChatTokenizer, source: FeatureSource, room: Room, *, flex: bool = False
    ) -> None:
        """With `flex`, attention is FlexAttention on a GPU, which takes seconds to compile; else masks are dense."""
        self._flex = flex and model.device.type == "cuda"
        self._model, self._source, self._room, self._device = model, source, room, model.device
        self._image_token_id = chat.image_token_id
        self._collate = PackCollator.of(chat, source)
        self._mask = PackMask(padded_length(1), self._device, flex=flex)
        self._longest = 0

    def ahead(self, batches: Iterable[Sequence[Example]]) -> Generator[tuple[BatchLayout, Iterator[Batch]]]:
        """The layout of each batch, and the model's inputs for its packs."""
        layouts: deque[BatchLayout] = deque()

        def numbered() -> Iterator[list[tuple[BatchLayout, int]]]:
            for batch in batches:
                layouts.append(BatchLayout.of(batch, self._image_token_id, self._room))
                yield [(layouts[-1], number) for number in range(len(layouts[-1].packs))]

        with contextlib.closing(Prefetcher(numbered(), self._make, self._device, NUM_AHEAD)) as prefetcher:
            while (first := next(packs := prefetcher.step(), None)) is not None:
                yield layouts.popleft(), (batch for batch, _ in chain([first], packs))

    def run(self, packs: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of each question's next token `[N, vocabulary]`, and its position `[N]`."""
        logits, positions = [], []
        for batch in packs:
            self._reserve(len(batch[MASK_KEY]))
            attention_mask = self._masks(batch.pop(MASK_KEY), batch["logits_to_keep"], batch.pop(STATE_ROWS))
            logits.append(self._model(**batch, attention_mask=attention_mask, use_cache=False).logits[0])
            positions.append(batch["position_ids"][0, 0, batch["logits_to_keep"]] + 1)
        return torch.cat(logits), torch.cat(positions)

    def _masks(self, seen_until: torch.Tensor, last: torch.Tensor, rows: torch.Tensor) -> Any:
        """The model's `attention_mask`; `last` are those of each question, `rows` those of each answer."""

        def states() -> OfPrompts:
            return OfPrompts(InPack.of(self._model, seen_until), last.repeat_interleave(self._room.num_samples), rows)

        return masks_with(self._model, self._mask(seen_until), states)

    def _reserve(self, length: int) -> None:
        """Make room in the mask; one mask serves all packs, since passes are compiled for its function."""
        if length > self._longest:
            self._longest = padded_length(max(length, self._room.tokens_per_pack))
            self._mask = PackMask(self._longest, self._device, flex=self._flex)

    def _make(self, pack_of_batch: tuple[BatchLayout, int]) -> Batch:
        """The inputs of a pack of a batch, by its number."""
        layout, number = pack_of_batch
        pack, of_pack = layout.packs[number], torch.from_numpy(layout.slots[number])
        length = padded_length(pack.num_tokens) if self._flex else pack.num_tokens
        batch = self._collate(pack.groups, layout.prompts, [0.0] * pack.num_samples, length)
        slots = torch.full((length,), PADDING)
        slots[: len(of_pack)] = of_pack
        text = {name: batch[name] for name in KEPT}
        questions = torch.tensor(pack.examples)
        num_samples = self._room.num_samples
        rows = state_rows(questions[:, None] * num_samples + torch.arange(num_samples)).flatten()
        text |= {"slots": slots, "logits_to_keep": torch.from_numpy(layout.last[number]), STATE_ROWS: rows}
        shown = [key for group in pack.groups for key in layout.prompts[group.examples[0]].image_keys]
        on_device = {name: tensor.to(self._device, non_blocking=True) for name, tensor in text.items()}
        return on_device | image_inputs(self._source, shown, self._device)


def add_token(
    model: Any, branches: Branches, number: torch.Tensor, chooser: Chooser, mask: Any, **options: Any
) -> None:
    """Compute the latest token of each branch, and add token `number` `[1]` to its answer."""
    masks = masks_with(model, mask, lambda: Continued.of(branches))
    with other_attention(model, STEPS):
        logits = model(
            input_ids=branches.token[None],
            position_ids=branches.position.expand(3, 1, -1),
            slots=branches.slot,
            use_cache=False,
            attention_mask=masks,
            **options,
        ).logits[0]
    branches.advance()
    branches.add(number, logits, chooser)


@dataclass(frozen=True)
class Rows:
    """The rows of a pass's tokens, and the blocks of keys that each block of rows reads."""

    of_token: NDArray[np.int64]
    """The row of each token, `[N]`."""
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    """The first block of keys of each block of rows, and the one behind its last."""

    @classmethod
    def of(cls, spans: Spans, rows_of_block: int) -> Rows:
        """Blocks of rows for tokens with these spans, those of each group one after another."""
        first, end = spans.first, spans.end
        rows = np.empty(len(first), dtype=np.int64)
        firsts: list[int] = []
        ends: list[int] = []
        edges = np.flatnonzero(np.diff(first, prepend=-1, append=-1))
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            for begin in range(start, stop, rows_of_block):
                chosen = slice(begin, min(begin + rows_of_block, stop))
                rows[chosen] = rows_of_block * len(firsts) + np.arange(chosen.stop - begin)
                firsts.append(first[begin] // BLOCK)
                ends.append(-(-end[chosen.stop - 1] // BLOCK))
        return cls(rows, np.array(firsts), np.array(ends))


class RowSteps:
    """Passes over the same tensors in all batches, whose mask is by rows."""

    def __init__(
        self,
        model: Any,
        num_slots: int,
        chooser: Chooser,
        branches: Branches,
        num_blocks: int,
        capture: Capture | None,
    ) -> None:
        """Allocate tensors for as many branches as there are in `branches`, and `num_blocks` blocks of rows.

        `num_slots` is the length of the buffer. Without `capture` each pass is launched.
        """
        self.branches, self.num_branches, self.num_blocks = branches, len(branches.slot), num_blocks
        self._model, self._chooser, self._capture = model, chooser, capture
        device, rows_of = branches.slot.device, rows_of_block(text_model(model).config)
        self._num_rows = rows_of * (num_blocks + 1)  # the last block is for branches that are not used

        def column(length: int, value: int = UNUSED) -> torch.Tensor:
            return torch.full((length,), value, dtype=torch.int32, device=device)

        self._rows = column(self.num_branches, self._num_rows - 1).long()
        """The row of each branch, `[num_branches]`."""
        self._until, self._num_keys = column(num_slots), column(num_blocks + 1, 0)[None, None]
        self._slot = column(self._num_rows)
        self._keys_of_rows = column((num_blocks + 1) * (num_slots // BLOCK), 0).view(1, 1, num_blocks + 1, -1)
        self._mask = self._block_mask(QUERIES // rows_of)
        self._number = torch.zeros(1, dtype=torch.long, device=device)
        self._replay: Callable[[], torch.Tensor] | None = None

    def _block_mask(self, heads: int) -> BlockMask:
        until, slot = self._until, self._slot

        def row_attends(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return attends(slot[query // heads], key, until[key])

        lengths = (self._num_rows * heads, len(until))
        return _block_mask(lengths, self._num_keys, self._keys_of_rows, row_attends)

    def start(self, branches: Branches, until: torch.Tensor, rows: Rows) -> Branches:
        """Take over some branches and the `until` of the slots in use; returns them in the tensors of the passes."""
        self.branches.ended.fill_(True)
        self.branches.slot.fill_(PADDING)
        self.branches.load(branches)
        self._until.fill_(UNUSED)
        self._until[: len(until)].copy_(until)
        self._slot.fill_(UNUSED)
        self._rows.fill_(self._num_rows - 1)
        self._rows[: len(rows.of_token)].copy_(torch.from_numpy(rows.of_token))
        numbers, indices = torch.from_numpy(rows.end - rows.first), torch.from_numpy(rows.first)
        self._num_keys.zero_()[..., -1] = 1  # unused branches attend to the padding: a row without keys may be NaN
        self._keys_of_rows[..., -1, 0] = PADDING // BLOCK
        self._num_keys[0, 0, : len(numbers)].copy_(numbers)
        key_rows = indices[:, None] + torch.arange(self._keys_of_rows.shape[-1])
        last = self._keys_of_rows.shape[-1] - 1
        self._keys_of_rows[0, 0, : len(indices)].copy_(key_rows.clamp(max=last).to(until.device))
        return self.branches.subset(slice(len(branches.slot)))

    def run(self, number: int) -> None:
        """Add token `number` to each answer."""
        self._number.fill_(number)
        if self._capture is None:
            self._pass()
        elif self._replay:
            self._replay()
        else:
            self._pass()  # compiles what cannot be compiled in a capture
            self._replay = self._capture(self._pass)

    def _pass(self) -> torch.Tensor:
        self._slot.index_copy_(0, self._rows, self.branches.slot.int())
        add_token(self._model, self.branches, self._number, self._chooser, self._mask, rows=self._rows)
        return self.branches.ended
