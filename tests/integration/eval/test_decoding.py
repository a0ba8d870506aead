"""Answers with shared prefixes have the tokens of stock `generate` on the stock model with its tower."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.trainings import compile_anew_by
from transformers import GenerationConfig

from lookonce.datasets.images import image_size
from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.datasets.sample.model import write_model
from lookonce.eval.decoding.batches import Room, plan_batches
from lookonce.eval.decoding.decoder import Decoder
from lookonce.eval.decoding.dialogue import Answer
from lookonce.families.qwen3_5 import QWEN3_5
from lookonce.families.qwen3_vl import QWEN3_VL
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.train.data.batches import Pixels, RowCollator
from lookonce.train.data.tokenize import Example
from lookonce.train.model.compile import num_compiled_graphs
from lookonce.train.model.load import load_with_tower, load_without_tower

AS_GENERATE = pytest.mark.guarantee(
    "Answers with shared prefixes have the tokens of stock `generate` on the stock model with its tower, in "
    "float32: for images of different sizes, 1 to 17 questions each, several images, several turns, a system "
    "text, no image and answers that end at any token; in batches of any size; also through layers of linear "
    "attention."
)

NEW_TOKENS = 6
PIXELS = {"min_pixels": 1, "max_pixels": 120_000}


def records_of(sample) -> list[Record]:
    """Images of several sizes with 1 to 17 questions, two images, several turns, a system text, and no image."""
    by_size = {image_size(record.images[0].read_bytes()): record for record in read_records(sample / "train.jsonl")}
    first, second, third, *_ = by_size.values()
    about = [(first, 17), (second, 1), (third, 4)]
    asked = [Record(one.images, (Turn(f"Is it number {n}?", "yes"),)) for one, num in about for n in range(num)]
    turns = (*first.turns, *second.turns, Turn("And now?", "no"))
    several = [Record((*third.images, *first.images), turns, system="Answer briefly."), Record(second.images, turns)]
    return [*asked, *several, *(Record((), (Turn(text, "no"),)) for text in ("Is there text?", "Is there none?"))]


@dataclass
class Asked:
    """Questions, the stock answers, and the model without its tower."""

    session: OpenRun
    examples: list[Example]
    stock: list[list[int]]
    model: Any

    def answers(self, chosen: list[int], room: Room, end: int, **options: bool) -> dict[int, Answer]:
        """The answers to some questions, if `end` were the end token."""
        chat = self.session.chat_tokenizer
        tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=end, decode=lambda ids, **_: " ".join(map(str, ids)))
        ending = SimpleNamespace(image_token_id=chat.image_token_id, merge_size=chat.merge_size, tokenizer=tokenizer)
        decoder = Decoder(self.model, ending, self.session.features, room, torch.float32, **options)
        questions = [self.examples[number] for number in chosen]
        found: dict[int, Answer] = {}
        batches = plan_batches(questions, [room.max_new_tokens] * len(questions), chat.image_token_id, room)
        answers = decoder.answers([questions[number] for number in batch] for batch in batches)
        for batch, of_batch in zip(batches, answers, strict=True):
            found |= {chosen[number]: answer for number, answer in zip(batch, of_batch, strict=True)}
        return found

    @property
    def never(self) -> int:
        """A token that is in no answer."""
        return min(set(range(100)) - {token for tokens in self.stock for token in tokens})

    def expected(self, number: int, end: int) -> tuple[int, ...]:
        tokens = self.stock[number]
        return tuple(tokens[: tokens.index(end) + 1] if end in tokens else tokens)


@pytest.fixture(scope="module", params=[QWEN3_VL, QWEN3_5], ids=lambda family: family.model_type)
def asked(request, sample, make_run_in, random_lora, tmp_path_factory) -> Asked:
    """With the layers of each kind: full attention alone, and linear attention beside it."""
    folder = tmp_path_factory.mktemp("decoding")
    model = {}
    if request.param is not QWEN3_VL:
        write_model(folder / "model", family=request.param)
        model = {"path": str(folder / "model")}
    write_records(folder / "asked.jsonl", records_of(sample), image_root=sample)
    data = {"train": str(folder / "asked.jsonl"), "val": [], "test": [], "image_root": str(sample)}
    options = {"train": {"precision": "fp32"}, "eval": {"max_new_tokens": NEW_TOKENS}, "model": model}
    inputs = open_run(make_run_in(folder, data=data, cache=PIXELS, **options), TO_BUILD)
    inputs.build()
    session = inputs
    questions = [(record, turn) for record in inputs.records["train"] for turn in range(len(record.turns))]
    examples = session.prompts(questions)
    stock, bare = (random_lora(inputs, load).eval() for load in (load_with_tower, load_without_tower))
    pixels = Pixels(inputs.processor, inputs.images.path_of)
    collator = RowCollator(pixels, session.chat_tokenizer.image_token_id, 0)
    return Asked(session, examples, [generated(stock, collator, example) for example in examples], bare)


@torch.inference_mode()
def generated(model: Any, collator: RowCollator, example: Example) -> list[int]:
    """The tokens that stock `generate` gives for one question."""
    batch = collator.prompts([example])
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    return model.eval().generate(**batch, generation_config=settings)[0, batch["input_ids"].shape[1] :].tolist()


def assert_stock_answers(asked: Asked, chosen: list[int], room: Room, end: int, **options: bool) -> None:
    found = asked.answers(chosen, room, end, **({"by_rows": False} | options))
    assert sorted(found) == sorted(chosen)
    for number, answer in found.items():
        assert answer.token_ids == asked.expected(number, end), asked.examples[number].origin
        assert (answer.ended == "stop") == (answer.token_ids[-1] == end)
        assert answer.logprob < 0


@AS_GENERATE
def test_all_answers_are_those_of_generate_in_one_batch_and_in_many(asked):
    every = list(range(len(asked.examples)))
    for num_slots, tokens_per_pack in ((100_000, 100_000), (1000, 300), (1, 1)):
        assert_stock_answers(asked, every, Room(num_slots, tokens_per_pack, NEW_TOKENS), asked.never)


@AS_GENERATE
@pytest.mark.filterwarnings("default:flex_attention called without torch.compile")
def test_passes_by_rows_have_the_same_answers_over_several_batches(asked):
    """As on a GPU, but launched and with FlexAttention written out."""
    some = list(range(0, len(asked.examples), 3))
    assert_stock_answers(asked, some, Room(600, 400, NEW_TOKENS), asked.stock[0][2], by_rows=True)


@pytest.mark.guarantee("The passes that decode answers are compiled once for all sizes of batches.")
@pytest.mark.filterwarnings("default")  # the compiler warns
def test_passes_are_compiled_once_for_all_sizes_of_batches(asked, monkeypatch):
    """Else a batch of another size would wait for the compiler, and an interrupted evaluation could have other bits."""
    compile_anew_by(monkeypatch, "eager")
    monkeypatch.setattr("lookonce.eval.decoding.decoder.BRANCHES", 2)
    before, end = num_compiled_graphs(), asked.stock[0][2]
    graphs = []
    for some in ([0, 1, 2, 3, 4, 5, 6, 7], [9, 20], [12, 13, 14, 15, 22]):
        assert_stock_answers(asked, some, Room(600, 400, NEW_TOKENS), end, by_rows=True, compiled=True)
        graphs.append(num_compiled_graphs() - before)
    is_hybrid = asked.session.model_folder.family is QWEN3_5
    # Prompts and steps. Linear attention divides a layer into two graphs, and has parts of its own: heads of packs and
    # of a token, and the gate.
    assert graphs == [8 if is_hybrid else 2] * 3


@AS_GENERATE
@settings(max_examples=15, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_answers_that_end_at_any_time_are_those_of_generate(asked, data):
    numbers = list(range(len(asked.examples)))
    chosen = data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=8, unique=True))
    room = Room(data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 2000)), NEW_TOKENS)
    end = data.draw(st.sampled_from([token for number in chosen for token in asked.stock[number]]))
    assert_stock_answers(asked, chosen, room, end)


def test_log_probabilities_are_those_of_the_whole_conversation_in_one_pass(asked):
    found = asked.answers(list(range(4)), Room(2000, 1000, NEW_TOKENS), asked.never)
    collator = asked.session.row_collator()
    for number, answer in found.items():
        example = asked.examples[number]
        token_ids = np.concatenate([example.token_ids, answer.token_ids]).astype(np.int32)
        supervised = np.arange(len(token_ids)) >= len(example.token_ids)
        batch = collator([replace(example, token_ids=token_ids, supervised=supervised)])
        weights, targets = batch.pop("weights"), batch.pop("targets")
        with torch.inference_mode():
            logits = asked.model(**batch, use_cache=False).logits
        expected = logits.log_softmax(dim=-1).gather(2, targets[..., None]).sum()
        assert len(weights[0]) == NEW_TOKENS and answer.logprob == pytest.approx(float(expected), rel=1e-4)
