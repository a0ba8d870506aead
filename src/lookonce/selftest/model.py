"""The self-test: a small Qwen3-VL with random weights, its loss and gradients of packs beside those of stock rows.

docs/selftest.md says what is compared. A minute on a GPU is mostly compilation, so each kernel is compiled only in the
precision in which trainings use it. float32 shows small faults, because its spread is a millionth; such faults are
those of the code around the kernels, so its layers are not compiled. Heads have 64 numbers in float32, since larger
ones exceed the shared memory of some GPUs, and 128 otherwise.

Examples are made of token ids and features are drawn, so no tokenizer, image, cache or vision tower is needed. From
there on they take the path of training: sampler, packing, collator, down to CUDA graphs. Questions of an image begin
alike, so the prefix reaches into them; some share more than that. There are images of few and of 2,000 tokens, several
in one question, and questions without one. Rows take transformers' own masks, positions and loss over whole rows of
labels. The two share the model's layers and nothing else.

Kernels depend on the size and the number of attention heads more than on anything else, so these are those of
Qwen3-VL-8B, and little else is. The same seed gives the weights of bfloat16 in every precision. The matrices B of the
adapter are drawn, because with zeros the gradients of A would be hidden.

Masks and block lists are compared with the definition of a pack (`allowed`), which is written from rows and not from
the code that training uses. Attention alone is compared with PyTorch's in float64, in its output and in the gradients
of its inputs, which are computed from different block lists. The spread is the distance of exact computations from the
reference. Replayed passes run all packs in several orders, so that each is replayed after others have been in its
buffers.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from peft import get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention

from lookonce.cache.format import Grid
from lookonce.datasets.sample.model import make_config, random_model
from lookonce.environment import best_device
from lookonce.errors import TrainingError
from lookonce.run.sections import BatchSection, LoraSection
from lookonce.selftest.report import ON_CPU, ON_GPU, Check, Report, Variant, attempted, combination, within_spread
from lookonce.text import Notify
from lookonce.train.data.batches import CPU, Batch
from lookonce.train.data.dataset import (
    DataCollatorForPacks,
    DataCollatorForRows,
    PackBatchSampler,
    PackIndices,
    VQADataset,
)
from lookonce.train.data.packing import BLOCK, Pack
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.first_pack import STOCK_KERNELS, Outcome
from lookonce.train.model.attention import PackMask, shared_prefix_attention
from lookonce.train.model.compile import as_loaded, for_all_lengths
from lookonce.train.model.load import PRECISIONS, replace_tower
from lookonce.train.model.lora import lora_config
from lookonce.train.model.packs import packed_attention, share_of_loss


class PackToMask(NamedTuple):
    """A pack of `L` tokens, padding included."""

    seen_until: torch.Tensor
    """`[L]`, as training has it."""
    allowed: torch.Tensor
    """`[L, L]`, by definition: true where the row's token attends to the column's."""


def allowed(pack: Pack, length: int, device: torch.device) -> torch.Tensor:
    """The definition: `[length, length]`, true where the row's token attends to the column's."""
    allowed, rows, end = torch.zeros(length, length, dtype=torch.bool, device=device), [], 0
    for group in pack.groups:
        row = [*range(end, end + group.num_prefix_tokens)]
        end += group.num_prefix_tokens
        for branch, shared in zip_longest(group.branch_tokens, group.shared_tokens, fillvalue=0):
            row = row[: group.num_prefix_tokens + shared] + [*range(end, end + branch - shared)]
            end += branch - shared
            rows.append(row)
    for row in (*rows, [*range(end, length)]):
        indices = torch.tensor(row, dtype=torch.long, device=device)
        allowed[indices[:, None], indices] = torch.ones(len(row), len(row), dtype=torch.bool, device=device).tril()
    return allowed


class Heads(NamedTuple):
    num_queries: int
    num_keys: int
    size: int


Attend = Callable[..., torch.Tensor]
"""Makes the output `[1, L, heads, size]` of queries, keys and values `[1, heads, L, size]`."""
ATTENTION_RESULTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")


def attention_checks(packs: Sequence[PackToMask], heads: Heads, dtype: torch.dtype, name: str) -> list[Check]:
    """Compare the attention of packs one after another, as in training."""
    device, repeats = packs[0].allowed.device, heads.num_queries // heads.num_keys
    mask, generator = PackMask(max(len(pack.allowed) for pack in packs), device), torch.Generator().manual_seed(0)
    layer = SimpleNamespace(num_key_value_groups=repeats, is_causal=True)
    distances: list[list[float]] = []
    spread: list[list[float]] = []
    for pack in packs:
        tensors = [
            torch.randn(1, num, len(pack.allowed), heads.size, generator=generator).to(device, dtype)
            for num in (heads.num_queries, heads.num_keys, heads.num_keys, heads.num_queries)
        ]

        def stock(query: torch.Tensor, *others: torch.Tensor, allowed: torch.Tensor = pack.allowed) -> torch.Tensor:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in others)
            return scaled_dot_product_attention(query, key, value, allowed[None, None]).transpose(1, 2)

        def packed(query: Any, key: Any, value: Any, seen_until: torch.Tensor = pack.seen_until) -> torch.Tensor:
            return shared_prefix_attention(layer, query, key, value, mask(seen_until), scaling=heads.size**-0.5)[0]

        exact = _results(stock, [tensor.double() for tensor in tensors])
        with for_all_lengths():
            distances.append(_distances(_results(packed, tensors), exact))
        spread.append(_distances(_results(stock, tensors), exact))
        with sdpa_kernel(SDPBackend.MATH):
            spread.append(_distances(_results(stock, tensors), exact))
    what = (f"attention, {name}: {result}" for result in ATTENTION_RESULTS)
    return [
        within_spread(*row) for row in zip(what, zip(*distances, strict=True), zip(*spread, strict=True), strict=True)
    ]


def _results(attend: Attend, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output for queries, keys and values, and their gradients along the last of `tensors`."""
    *inputs, direction = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, direction.transpose(1, 2))]


def _distances(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    """The largest differences, relative to the largest values."""
    return [
        float((result - reference).abs().max() / reference.abs().max())
        for result, reference in zip(results, exact, strict=True)
    ]


def mask_checks(packs: Sequence[PackToMask]) -> list[Check]:
    """Compare the mask function and both block lists of packs with the definition, one pack after another."""
    mask = PackMask(max(len(pack.allowed) for pack in packs), packs[0].allowed.device)
    wrong = {"mask function": 0, "block lists by row": 0, "block lists by column": 0}
    for seen_until, allowed in packs:
        blocks, length = mask.blocks(seen_until), len(allowed)
        function = create_mask(blocks.mask_mod, None, None, length, length, str(allowed.device))[0, 0]
        in_blocks = allowed.view(length // BLOCK, BLOCK, -1, BLOCK).transpose(1, 2).flatten(2)
        expected = in_blocks.any(-1).int() + in_blocks.all(-1).int()  # 0 if no pair attends, 2 if all do
        wrong["mask function"] += int((function != allowed).sum())
        wrong["block lists by row"] += _num_wrong(blocks, "kv", expected)
        wrong["block lists by column"] += _num_wrong(blocks, "q", expected.T)
    return [Check(f"{name}: wrong entries", number, 0) for name, number in wrong.items()]


def _num_wrong(blocks: BlockMask, side: str, expected: torch.Tensor) -> int:
    """Wrong entries of the lists of one side; kernels read all lists that are not contiguous wrongly."""
    listed = torch.zeros_like(expected)
    for kind, prefix in ((1, side), (2, f"full_{side}")):
        numbers, indices = (getattr(blocks, f"{prefix}_{name}") for name in ("num_blocks", "indices"))
        if not indices.is_contiguous():
            return expected.numel()
        for row, number in enumerate(numbers.flatten().tolist()):
            listed[row, indices[0, 0, row, :number].long()] += kind
    return int((listed != expected).sum())


SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IDS = {token: number for number, token in enumerate(SPECIAL)}
VOCABULARY = 512
NUM_LEVELS = 4
"""Levels of the features: the merged output and three of DeepStack."""
MERGE_SIZE = 2
ImageSizes = tuple[int, int]
"""Height and width of an image in tokens."""


@dataclass(frozen=True)
class Questions:
    """How many questions about which images are made."""

    images: tuple[ImageSizes, ...]
    num_questions: tuple[int, ...]
    """Questions about each image, and about the last two together; as many have no image as the last number says."""
    tokens_per_pack: int
    samples_per_step: int


class RandomFeatures:
    """Features that are drawn from the image's name, as a `FeatureSource`."""

    has_tower: ClassVar[bool] = False

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden

    def grid_thw(self, key: str) -> Grid:
        height, width = map(int, key.split("x"))
        return 1, height * MERGE_SIZE, width * MERGE_SIZE

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        return torch.cat([self._draw(key) for key in keys]).to(device)

    def _draw(self, key: str) -> torch.Tensor:
        height, width = map(int, key.split("x"))
        generator = torch.Generator().manual_seed(height * 1000 + width)
        return torch.randn(height * width, NUM_LEVELS, self.hidden, generator=generator).bfloat16()


def random_examples(questions: Questions) -> list[Example]:
    """The questions about each image, then those about the last two images, then those about none."""
    rng = random.Random(0)
    shown: list[tuple[ImageSizes, ...]] = [(size,) for size in questions.images]
    shown += [questions.images[-2:], ()]
    numbers = (*questions.num_questions, questions.num_questions[-1])
    return [_example(rng, images) for images, number in zip(shown, numbers, strict=True) for _ in range(number)]


def _example(rng: random.Random, images: tuple[ImageSizes, ...]) -> Example:
    first = IDS["<|im_end|>"], *range(10, 14)
    image = [IDS[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end")]
    known = range(22, 22 + rng.choice([0, 0, 3, 7]))  # questions that begin alike have one more level of prefix, or two
    question = [20, 21, *known, *_words(rng, rng.randint(1, 20))]
    answer = [*_words(rng, rng.randint(1, 6)), IDS["<|im_end|>"]]
    token_ids = np.array([*first, *image * len(images), *question, *answer], dtype=np.int32)
    supervised = np.arange(len(token_ids)) >= len(token_ids) - len(answer)
    keys = tuple(f"{height}x{width}" for height, width in images)
    return Example(token_ids, supervised, keys, tuple(height * width for height, width in images), "self-test")


def _words(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(30, VOCABULARY) for _ in range(number)]


def make_sampler(questions: Questions, hidden: int) -> PackBatchSampler:
    batch = BatchSection(samples_per_step=questions.samples_per_step, tokens_per_pack=questions.tokens_per_pack)
    tokenizer = SimpleNamespace(pad_token_id=IDS["<|endoftext|>"])
    chat: Any = SimpleNamespace(image_token_id=IDS["<|image_pad|>"], merge_size=MERGE_SIZE, tokenizer=tokenizer)
    return PackBatchSampler.of(VQADataset.of(random_examples(questions), chat, RandomFeatures(hidden)), batch, seed=1)


def stock_rows(dataset: VQADataset, indices: PackIndices, rows_per_pass: int, device: torch.device) -> Iterator[Batch]:
    """The questions of a pack as padded rows with labels, in random order, as stock training has them.

    `num_items_in_batch` is the number of targets of the whole step, by which transformers divides the sum of losses.
    """
    examples = [dataset[index] for index in indices]
    random.Random(0).shuffle(examples)
    collate = DataCollatorForRows(dataset)
    num_targets = torch.tensor(1 / indices.micro_batch.target_weights[0])
    for start in range(0, len(examples), rows_per_pass):
        batch = collate(examples[start : start + rows_per_pass]) | {"num_items_in_batch": num_targets}
        # the grids stay on the CPU, where they are read without a host-device sync
        yield {name: value if name == "image_grid_thw" else value.to(device) for name, value in batch.items()}


LORA_STD = 0.1
"""Standard deviation of the matrices B of the adapter."""
MROPE = {16: [4, 2, 2], 64: [12, 10, 10], 128: [24, 20, 20]}
"""mRoPE's sections by the size of a head."""


@dataclass(frozen=True)
class ModelSize:
    hidden: int
    num_layers: int
    heads: Heads


def small_model(size: ModelSize, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in `dtype`; its trained weights are float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = _config(size)
        model: Any = random_model(config, 0, torch.float32)
        model = model.bfloat16().to(dtype)  # in all precisions the weights of bfloat16
        replace_tower(model, dtype)
        adapted = get_peft_model(model.requires_grad_(False), lora_config(LoraSection(rank=8)))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, LORA_STD, generator=generator)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted.to(device).train()


def _config(size: ModelSize) -> Any:
    config: Any = make_config("tiny", IDS)
    text: Any = config.text_config
    text.vocab_size, text.hidden_size, text.intermediate_size = VOCABULARY, size.hidden, 2 * size.hidden
    text.num_hidden_layers, text.head_dim = size.num_layers, size.heads.size
    text.num_attention_heads, text.num_key_value_heads = size.heads.num_queries, size.heads.num_keys
    text.rope_parameters = text.rope_parameters | {"mrope_section": MROPE[size.heads.size]}
    config.vision_config.out_hidden_size = size.hidden
    return config


class Passes:
    """Forward and backward passes of a model in one precision, with autocast as in training."""

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.dtype, self.device = model, dtype, device

    def run(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Run a pack, or rows with target weights, forward and backward; returns the loss."""
        with self.autocast():
            loss = share_of_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def outcome(self, batches: Iterable[Mapping[str, Any]]) -> Outcome:
        total = torch.zeros((), device=self.device)
        for batch in batches:
            total += self.run(batch)
        return Outcome.of(self.model, total)

    def stock(self, rows: Iterable[Batch], attention: str = "sdpa") -> Outcome:
        """The outcome of stock training on some rows, with one of transformers' attentions."""
        total = torch.zeros((), device=self.device)
        with as_loaded(self.model, attention), sdpa_kernel(STOCK_KERNELS):
            for batch in rows:
                with self.autocast():
                    loss: torch.Tensor = self.model(**batch, use_cache=False).loss
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return Outcome.of(self.model, total)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


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


RESULTS = ("loss", "gradient")
SEVERAL = 4
"""Rows of a forward pass of the reference."""
EPOCHS = 3
"""Epochs of packs, the first of which are launched where others are captured."""


class ModelChecks:
    """The comparisons in one precision; the reference is computed once."""

    def __init__(
        self, size: ModelSize, questions: Questions, dtype: torch.dtype, name: str, device: torch.device
    ) -> None:
        self.name, self.dtype = name, dtype
        self.heads, sampler = size.heads, make_sampler(questions, size.hidden)
        self.dataset, self.packs = sampler.dataset, [*sampler]
        self.collator = DataCollatorForPacks(sampler.dataset, device=device, pads_to_blocks=True)
        self.model, self.device = small_model(size, dtype, device), device
        exact = small_model(size, torch.float32, device)
        self.expected = self._rows(Passes(exact, torch.float32, device), SEVERAL)
        self.spread = self._spread()

    def masks(self) -> list[Check]:
        return mask_checks(self._to_mask())

    def attention(self) -> list[Check]:
        return attempted(
            f"attention, {self.name}", lambda: attention_checks(self._to_mask(), self.heads, self.dtype, self.name)
        )

    def _to_mask(self) -> list[PackToMask]:
        columns = [self._batch(number)["seen_until"] for number in range(len(self.packs))]
        return [
            PackToMask(column, allowed(indices.micro_batch.pack, len(column), self.device))
            for column, indices in zip(columns, self.packs, strict=True)
        ]

    def _batch(self, number: int) -> dict[str, Any]:
        return self.collator(self.dataset.__getitems__(self.packs[number]))

    def checks(self, variant: Variant) -> list[Check]:
        name = f"model, {self.name}, {variant.name}"

        def compare() -> list[Check]:
            differences, spreads = zip(*self._distances(variant), strict=True), zip(*self.spread, strict=True)
            return [
                within_spread(f"{name}: {result}", difference, spread, variant)
                for result, difference, spread in zip(RESULTS, differences, spreads, strict=True)
            ]

        return attempted(name, compare, variant)

    def _distances(self, variant: Variant) -> list[tuple[float, float]]:
        """The distance of each pack's outcome from the expected one."""
        passes = Passes(self.model, self.dtype, self.device)
        with packed_attention(self.model, compiled=variant.compiled, captured=variant.captured, flex=variant.flex):
            return [
                passes.outcome([self._batch(number)]).distance(self.expected[number])
                for number in _orders(len(self.packs))
            ]

    def _spread(self) -> list[tuple[float, float]]:
        """Distances of exact computations of rows from the reference."""
        passes = Passes(self.model, self.dtype, self.device)
        computed = [self._rows(passes, 1), self._rows(passes, 1, "eager"), self._rows(passes, SEVERAL)]
        return [
            outcome.distance(expected)
            for outcomes in computed
            for outcome, expected in zip(outcomes, self.expected, strict=True)
        ]

    def _rows(self, passes: Passes, rows_per_pass: int, attention: str = "sdpa") -> list[Outcome]:
        return [
            passes.stock(stock_rows(self.dataset, indices, rows_per_pass, self.device), attention)
            for indices in self.packs
        ]


def _orders(number: int) -> list[int]:
    """The numbers below `number` in several random orders, one after another."""
    rng = random.Random(0)
    return [index for _ in range(EPOCHS) for index in rng.sample(range(number), number)]


AMPERE = (8, 0)
"""CUDA capability of the first GPUs with bfloat16."""
Sizes = tuple[Questions, Mapping[str, ModelSize]]
"""How much is compared: the questions, and the model in float32 and then, unless that is float32, as it is trained."""


def gpu_sizes(precision: str = "bf16") -> Sizes:
    """Heads as in real models, images of up to 2,000 tokens, and packs of up to 4,096.

    What takes most memory is the reference of the attention in float64, for a pack of 2,560 tokens.
    """
    questions = Questions(((5, 6), (12, 10), (40, 50), (16, 20), (4, 4)), (9, 5, 3, 17, 4, 2), 4096, 7)
    models = {"fp32": ModelSize(256, 4, Heads(8, 2, 64))}
    models.setdefault(precision, ModelSize(256, 4, Heads(8, 2, 128)))
    return questions, models


def cpu_sizes() -> Sizes:
    """The same with small heads, images and packs."""
    size = ModelSize(64, 4, Heads(4, 2, 16))
    return Questions(((3, 4), (6, 5), (12, 16), (2, 3)), (7, 4, 3, 2, 2), 512, 6), {"fp32": size, "bf16": size}


def run_selftest(notify: Notify = print) -> Report:
    """Run the self-test in the best precision of the best device; raises TrainingError if the GPU is out of memory."""
    start, on_gpu = time.perf_counter(), torch.cuda.is_available()
    precision = default_precision()
    try:
        with ieee_float32():
            checks = compared(gpu_sizes(precision) if on_gpu else cpu_sizes(), ON_GPU if on_gpu else ON_CPU, notify)
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the self-test is out of memory; it needs 4 GB of the GPU, which other programs may be using"
        ) from None
    return Report(combination(precision), tuple(checks), time.perf_counter() - start)


def default_precision() -> str:
    """bf16, or fp16 on a GPU without it."""
    has_bf16 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= AMPERE
    return "bf16" if has_bf16 else "fp16"


def compared(sizes: Sizes, variants: Sequence[Variant], notify: Notify) -> list[Check]:
    """The checks of masks, attention and variants; in float32, of those variants that are not compiled, as parts."""
    checks: list[Check] = []
    questions, models = sizes
    for precision, size in models.items():
        is_part = precision != [*models][-1]
        notify(f"computing stock rows in {precision}")
        packs = ModelChecks(size, questions, PRECISIONS[precision], precision, best_device())
        notify("comparing masks and attention")
        checks += packs.attention() if checks else [*packs.masks(), *packs.attention()]
        for variant in variants:
            if not (is_part and variant.compiled):
                notify(f"comparing packs in {precision}: {variant.name}")
                checks += [replace(check, is_part=is_part) for check in packs.checks(variant)]
    return checks
