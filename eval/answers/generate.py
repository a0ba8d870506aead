"""Greedy answers by transformers' `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from lookonce.eval.decoding.answer import Answer
from lookonce.train.data.collate_rows import RowCollator
from lookonce.train.data.tokenize import Example
from lookonce.train.model.load import PRECISIONS, base_model


@torch.inference_mode()
def greedy_answers(
    model: Any,
    tokenizer: Any,
    collator: RowCollator,
    questions: Sequence[Example],
    max_new_tokens: int,
    precision: str,
) -> list[Answer]:
    """The model's greedy answers to questions that are answered together, in order; `model` may have an adapter.

    `precision` is the run file's; in bf16 and fp16 answers are generated under autocast, as in training.
    """
    device, dtype = model.device, PRECISIONS[precision]
    model.eval()
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    with autocast, _greedy_only(model, tokenizer, max_new_tokens):
        batch = collator.prompts(questions)
        chosen = ChosenLogprobs()
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        output = model.generate(**inputs, logits_processor=LogitsProcessorList([chosen]))
    logprobs = torch.stack(chosen.logprobs, dim=1).tolist()
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


@contextlib.contextmanager
def _greedy_only(model: Any, tokenizer: Any, max_new_tokens: int) -> Iterator[None]:
    """Replace the model folder's generation settings, which may ask for sampling or penalties."""
    base = base_model(model)
    before = base.generation_config
    base.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    try:
        yield
    finally:
        base.generation_config = before
