"""The engines that answer questions (`eval.engine`): shared prefixes, also for samples, or transformers' `generate`.

An engine plans its batches before the model is loaded, from the questions and the settings alone. So an answer has the
same bits on any rank and after any interruption. For the same reason the size of a batch follows from the whole memory
of the GPU; only beside a training it follows from what is free. If memory runs out all the same, a batch is answered in
parts. States of linear attention take the memory of hundreds of tokens each, and each sample has logits, so the number
of both has a limit of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TextStreamer

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.errors import TrainingError
from lookonce.eval.decoding.batches import Room, plan_batches
from lookonce.eval.decoding.buffers import WORKING, bytes_per_state, bytes_per_token
from lookonce.eval.decoding.decoder import Decoder
from lookonce.eval.decoding.dialogue import Answer, Dialogue, Sample
from lookonce.eval.decoding.sampling import Sampling
from lookonce.run.open import OpenRun
from lookonce.text import Notify, quiet
from lookonce.train.data.batches import RowCollator
from lookonce.train.data.packing import group_examples
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.distributed import Ranks
from lookonce.train.model.linear_attention import LINEAR
from lookonce.train.model.load import PRECISIONS, base_model, replaced

ON_CPU = 8192
SMALLEST, LARGEST = 4096, 65_536
"""Tokens of a batch. With more than the largest a GPU is not faster, and the logits of a step take gigabytes."""
SPARE = 0.1
"""Share of the memory that stays free, for CUDA and for what PyTorch reserves without using it."""
PROMPTS = 2e9
"""Bytes that passes over packs of prompts take."""
SLOTS_OF_BRANCH = 64
"""About the number of tokens of a batch to a branch, each of which has logits, and at least that to a state."""
BYTES_OF_LOGIT = 14
"""A logit in bfloat16, and three times in float32."""


def largest_batch(model_folder: ModelFolder, dtype: torch.dtype) -> int:
    """The largest power of 2 whose keys, values and logits fit beside the weights, within limits."""
    if not torch.cuda.is_available():
        return ON_CPU
    total = torch.cuda.get_device_properties(0).total_memory
    return _tokens_in(total * (1 - SPARE) - weight_bytes(model_folder, dtype), model_folder, dtype)


def tokens_beside_training(opened: OpenRun, model: Any, ranks: Ranks) -> int | None:
    """The same for the memory that is free while a model is trained, on the GPU that has least; None on a CPU."""
    if model.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    tokens = _tokens_in(free - total * SPARE, opened.model_folder, PRECISIONS[opened.run.train.precision])
    return -ranks.largest(-tokens)


def with_batches(opened: OpenRun, tokens_per_batch: int | None) -> OpenRun:
    changed = opened.run.eval.model_copy(update={"tokens_per_batch": tokens_per_batch})
    return opened.changed(run=opened.run.model_copy(update={"eval": changed}))


def states_per_batch(model_folder: ModelFolder, num_tokens: int, sampling: Sampling | None = None) -> int | None:
    """The answers that a batch of `num_tokens` may have, if they are samples or have states of linear attention."""
    is_limited = sampling or LINEAR in model_folder.family.layer_types
    return max(num_tokens // SLOTS_OF_BRANCH, 1) if is_limited else None


def _tokens_in(num_bytes: float, model_folder: ModelFolder, dtype: torch.dtype) -> int:
    text = model_folder.config.get_text_config()
    of_branch = text.vocab_size * BYTES_OF_LOGIT + bytes_per_state(text, dtype, num_more=WORKING)
    each = bytes_per_token(text, dtype) + of_branch // SLOTS_OF_BRANCH
    tokens = int((num_bytes - PROMPTS) // each)
    return min(1 << max(tokens, SMALLEST).bit_length() - 1, LARGEST)


def weight_bytes(model_folder: ModelFolder, dtype: torch.dtype) -> float:
    """Bytes of the weights in memory, tower included, for files with the data type of the model's config."""
    in_files = model_folder.config.dtype
    size = in_files.itemsize if isinstance(in_files, torch.dtype) else torch.bfloat16.itemsize
    return model_folder.num_weight_bytes * dtype.itemsize / size


@torch.inference_mode()
def greedy_answers(
    opened: OpenRun,
    model: Any,
    collator: RowCollator,
    questions: Sequence[Example],
    streamer: TextStreamer | None = None,
) -> list[Answer]:
    """The model's greedy answers to questions that are answered together, in order; `model` may have an adapter.

    In bf16 and fp16 answers are generated under autocast, as in training. A `streamer` gets the tokens
    of the answer to a single question as they come.
    """
    tokenizer, device, dtype = opened.chat_tokenizer.tokenizer, model.device, PRECISIONS[opened.run.train.precision]
    model.eval()
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=opened.run.eval.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # In place of the model folder's settings, which may ask for sampling or penalties; an argument leaves these.
    with autocast, replaced([(base_model(model), "generation_config", greedy)]):
        batch = collator.prompts(questions)
        chosen = ChosenLogprobs()
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        output = model.generate(**inputs, logits_processor=LogitsProcessorList([chosen]), streamer=streamer)
    logprobs = torch.stack(chosen.logprobs, dim=1)[..., None].tolist()
    rows = zip(output[:, batch["input_ids"].shape[1] :].tolist(), logprobs, strict=True)
    return [Answer.of(tokens, values, tokenizer) for tokens, values in rows]


class ChosenLogprobs(LogitsProcessor):
    """Changes nothing, and keeps the log-probability of the likeliest token, which a greedy answer takes."""

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []
        """For each token of the answers, those of all rows `[B]`."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logprobs.append(scores.max(dim=-1).values - scores.logsumexp(dim=-1))
        return scores


BATCH_SIZE = 16
"""Questions that `generate` answers together."""
MIN_COMPILED = 500
"""Questions from which on passes are compiled and captured on a GPU, which takes about 12 seconds."""
CPU_PACK = 1024
"""Tokens of a pack on a CPU, where attention with a dense mask takes time for all pairs of tokens of a pack."""


Answers = list[list[Answer]]
"""The answers to the questions of each dialogue of a batch."""


@dataclass(frozen=True)
class Generate:
    """transformers' `generate`, in batches of questions of similar length, so that padding is small."""

    opened: OpenRun

    def plan(self, dialogues: Sequence[Dialogue]) -> list[list[int]]:
        """The numbers of the dialogues that are answered together."""
        order = sorted(range(len(dialogues)), key=lambda number: dialogues[number].first.num_tokens)
        return [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]

    def stream(self, model: Any, batches: Sequence[Sequence[Dialogue]], notify: Notify = quiet) -> Iterator[Answers]:
        """The greedy answers to each batch of dialogues that are answered together, in order."""
        collator = self.opened.row_collator()
        for batch in batches:
            yield in_turns(batch, lambda prompts: greedy_answers(self.opened, model, collator, prompts))


def in_turns(dialogues: Sequence[Dialogue], answer: Callable[[list[Example]], list[Answer]]) -> Answers:
    """The answers to dialogues that are answered together: their first questions, then those that follow, and so on."""
    answers: Answers = [[] for _ in dialogues]
    while unanswered := [n for n, dialogue in enumerate(dialogues) if len(answers[n]) < dialogue.num_questions]:
        new_answers = answer([dialogues[n].prompt(answers[n]) for n in unanswered])
        for n, new_answer in zip(unanswered, new_answers, strict=True):
            answers[n].append(new_answer)
    return answers


class SharedPrefixes:
    """Each image's tokens once for all its questions, and each question's once for all its samples."""

    def __init__(
        self, opened: OpenRun, sampling: Sampling | None = None, *, seed: int = 0, min_compiled: int = MIN_COMPILED
    ) -> None:
        """With `min_compiled` answers or more, passes are compiled and captured, if there is a GPU.

        With `sampling` each question has as many answers, drawn with the seed; without it, one that is greedy.
        """
        self.sampling, self.seed = sampling, seed
        self._source, self._chat, self._min_compiled = opened.features, opened.chat_tokenizer, min_compiled
        run, model = opened.run, opened.model_folder
        self._dtype = PRECISIONS[run.train.precision]
        on_gpu = torch.cuda.is_available()
        tokens_per_pack = run.batch.tokens_per_pack if on_gpu else min(run.batch.tokens_per_pack, CPU_PACK)
        num_slots = run.eval.tokens_per_batch or largest_batch(model, self._dtype)
        num_samples = sampling.num_samples if sampling else 1
        longest = (sampling and sampling.max_new_tokens) or run.eval.max_new_tokens
        most = states_per_batch(model, num_slots, sampling)
        self.room = Room(num_slots, tokens_per_pack, longest, most, num_samples)
        self._on_gpu, self._can_compile = on_gpu, run.train.compile
        self._num_planned = 0
        self._decoder: Decoder | None = None

    def plan(self, dialogues: Sequence[Dialogue]) -> list[list[int]]:
        num_samples = self.room.num_samples
        self._num_planned += sum(dialogue.num_questions for dialogue in dialogues) * num_samples
        behind = [dialogue.room(self.room.max_new_tokens) * num_samples for dialogue in dialogues]
        return plan_batches([dialogue.first for dialogue in dialogues], behind, self._chat.image_token_id, self.room)

    def _parts(self, prompts: Sequence[Example]) -> list[list[int]]:
        """The numbers of the questions that fit together, mostly all of a batch."""
        behind = [self.room.max_new_tokens * self.room.num_samples] * len(prompts)
        return plan_batches(prompts, behind, self._chat.image_token_id, self.room)

    def stream(self, model: Any, batches: Sequence[Sequence[Dialogue]], notify: Notify = quiet) -> Iterator[Answers]:
        """The answers to each batch of dialogues. Batches overlap, unless answers are part of later prompts.

        The samples of a dialogue of one question are its answers; others have none.

        Raises:
            TrainingError: one question does not fit.
        """
        if any(dialogue.later for batch in batches for dialogue in batch):
            for batch in batches:
                yield in_turns(batch, lambda prompts: next(self._answers(model, [prompts], notify)))
        else:
            for answers in self._answers(model, [[dialogue.first for dialogue in batch] for batch in batches], notify):
                yield _groups(answers, self.room.num_samples)

    def samples(
        self, model: Any, questions: Sequence[Example], seed: int, notify: Notify = quiet
    ) -> list[list[Sample]]:
        """The samples of each question, in order; `questions` are prompts, and `model` may have an adapter.

        The same seed gives the same question the same samples, whatever the others. The engine keeps its buffers and
        captured passes for the next call; the model's weights may change in between.

        Raises:
            TrainingError: one question does not fit.
        """
        self.seed = seed
        dialogues = [Dialogue(question) for question in questions]
        planned = self.plan(dialogues)
        samples: dict[int, Any] = {}
        for batch, answers in zip(
            planned, self.stream(model, [[dialogues[n] for n in b] for b in planned], notify), strict=True
        ):
            samples |= zip(batch, answers, strict=True)
        return [samples[number] for number in range(len(questions))]

    def _answers(self, model: Any, batches: Sequence[Sequence[Example]], notify: Notify) -> Iterator[list[Answer]]:
        """The answers to each batch of prompts; to parts of half its size if the GPU is out of memory."""
        left = deque(batches)
        while left:
            parts = [self._parts(batch) for batch in left]
            cut = zip(left, parts, strict=True)
            fitting = [[batch[n] for n in part] for batch, batch_parts in cut for part in batch_parts]
            answers = self.decoder_of(model).answers(fitting)
            try:
                for batch_parts in parts:
                    grouped = ((part, _groups(next(answers), self.room.num_samples)) for part in batch_parts)
                    answers_of = dict(pair for pairs in grouped for pair in zip(*pairs, strict=True))
                    left.popleft()
                    yield [answer for number in range(len(answers_of)) for answer in answers_of[number]]
                return
            except torch.OutOfMemoryError:
                answers.close()
                self._make_less_room(left[0], notify)

    def _make_less_room(self, prompts: Sequence[Example], notify: Notify) -> None:
        """Leave room for at most half of a batch from now on."""
        if all(len(part) == 1 for part in self._parts(prompts)):
            longest = max(prompts, key=lambda example: example.num_tokens)
            fewer = ", take fewer samples" if self.sampling else ""
            raise TrainingError(
                f"the GPU is out of memory for one question of {longest.num_tokens:,} tokens "
                f"({longest.origin}); lower `eval.max_new_tokens`{fewer} or use a larger GPU"
            ) from None
        groups = group_examples(prompts, self._chat.image_token_id)
        num_answers = len(prompts) * self.room.num_samples
        num_slots = sum(group.num_tokens for group in groups) + num_answers * self.room.max_new_tokens
        num_slots = min(num_slots, self.room.num_slots) // 2
        notify(f"out of memory; answering {num_slots:,} tokens at a time; set a lower `eval.tokens_per_batch`")
        self.room, self._decoder = replace(self.room, num_slots=num_slots), None
        torch.cuda.empty_cache()

    def decoder_of(self, model: Any) -> Decoder:
        """The decoder of a model, which keeps its buffers and captured passes from batch to batch."""
        if model.training:  # else compiled layers would be compiled again for it
            model.eval()
        if self._decoder is None or self._decoder.model is not model:
            is_quick = self._on_gpu and self._num_planned >= self._min_compiled
            self._decoder = Decoder(
                model,
                self._chat,
                self._source,
                self.room,
                self._dtype,
                self.sampling,
                by_rows=is_quick,
                compiled=is_quick and self._can_compile,
            )
        self._decoder.seed = self.seed
        return self._decoder


def _groups(answers: Sequence[Answer], size: int) -> Answers:
    return [[*answers[start : start + size]] for start in range(0, len(answers), size)]


Engine = Generate | SharedPrefixes


def engine_of(opened: OpenRun) -> Engine:
    return Generate(opened) if opened.run.eval.engine == "generate" else SharedPrefixes(opened)
