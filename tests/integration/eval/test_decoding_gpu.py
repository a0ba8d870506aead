"""On a GPU answers with shared prefixes are those of `generate`, apart from rounding: compiled, and replayed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.trainings import COMPILED_ON_GPU

from lookonce.eval.answers.engines import Generate, SharedPrefixes
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding import decoder, passes
from lookonce.eval.decoding.sampling import Sampling
from lookonce.run.open import TO_BUILD, open_run
from lookonce.train.model.load import PRECISIONS, load_without_tower

pytestmark = COMPILED_ON_GPU

NEW_TOKENS = 12
Tokens = list[tuple[int, ...]]


class Asked:
    """The sample's training questions, and a model with a random adapter, in one precision."""

    def __init__(self, run, random_lora, precision: str) -> None:
        train, evaluation = (
            run.train.model_copy(update={"precision": precision}),
            run.eval.model_copy(update={"max_new_tokens": NEW_TOKENS, "tokens_per_batch": 4096}),
        )
        inputs = open_run(run.model_copy(update={"train": train, "eval": evaluation}), TO_BUILD)
        inputs.build()
        self.session = inputs
        self.model = random_lora(inputs, load_without_tower, PRECISIONS[precision]).to("cuda").eval()
        self.questions = Questions(self.session, "train").asking([(record, 0) for record in inputs.records["train"]])

    def given(self, engine) -> Tokens:
        """The tokens of each answer."""
        dialogues, numbers = self.questions.dialogues, self.questions.numbers
        batches = engine.plan(dialogues)
        found: dict[int, tuple[int, ...]] = {}
        given = engine.stream(self.model, [[dialogues[number] for number in batch] for batch in batches])
        for batch, answers in zip(batches, given, strict=True):
            for number, some in zip(batch, answers, strict=True):
                found |= zip(numbers[number], (answer.token_ids for answer in some), strict=True)
        return [found[number] for number in range(len(self.questions.record_turns))]

    def generated(self) -> Tokens:
        return self.given(Generate(self.session))


def num_different(some: Tokens, others: Tokens) -> int:
    return sum(one != other for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("min_compiled", [0, 10**9])
def test_float32_answers_are_those_of_generate_over_several_batches(make_run, random_lora, min_compiled):
    asked = Asked(make_run(), random_lora, "fp32")
    engine = SharedPrefixes(asked.session, min_compiled=min_compiled)
    assert len(engine.plan(asked.questions.dialogues)) > 2
    shared, generated = asked.given(engine), asked.generated()
    assert len(set(shared)) > 3 and num_different(shared, generated) <= len(shared) // 100


def test_bfloat16_answers_are_as_near_to_those_of_float32_as_those_of_generate(make_run, random_lora):
    """The kernels of this small model give the same bits for one row and for 16, so rows are no measure of rounding."""
    exact, asked = (Asked(make_run(), random_lora, precision) for precision in ("fp32", "bf16"))
    expected, generated, shared = (
        exact.generated(),
        asked.generated(),
        asked.given(SharedPrefixes(asked.session, min_compiled=0)),
    )
    spread = num_different(generated, expected)
    print(f"{len(shared)} answers: {num_different(shared, expected)} differ from float32's, {spread} of generate")
    assert num_different(shared, expected) <= spread + 2 * spread**0.5 + 1


def test_replayed_passes_have_the_bits_of_launched_ones_whatever_leaves_the_batch(make_run, random_lora, monkeypatch):
    asked = Asked(make_run(), random_lora, "bf16")
    monkeypatch.setattr(decoder, "BRANCHES", 4)
    replayed = asked.given(SharedPrefixes(asked.session, min_compiled=0))

    def launched(self, number):
        self._number.fill_(number)
        self._pass()

    monkeypatch.setattr(passes.RowSteps, "run", launched)
    assert asked.given(SharedPrefixes(asked.session, min_compiled=0)) == replayed


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_samples_of_captured_and_launched_passes_are_those_of_a_cpu(make_run, random_lora, top_p):
    """The second call replays the passes of the first, with another seed."""
    asked = Asked(make_run(), random_lora, "fp32")
    examples, sampling = asked.questions.examples[:60], Sampling(4, 1.0, top_p, NEW_TOKENS)
    given = []
    for min_compiled, device in ((0, "cuda"), (10**9, "cuda"), (10**9, "cpu")):
        engine = SharedPrefixes(asked.session, sampling, min_compiled=min_compiled)
        model = asked.model.to(device)
        answers = [one for seed in (1, 2) for each in engine.samples(model, examples, seed) for one in each]
        given.append(([one.token_ids for one in answers], [one.logprobs + one.sampled for one in answers]))
    (captured, logprobs), (launched, _), (on_cpu, expected) = given
    assert len({*captured}) > 60
    print(num_different(captured, on_cpu), num_different(launched, on_cpu), "of", len(captured), "differ")
    assert num_different(captured, on_cpu) <= len(captured) // 100
    assert num_different(launched, on_cpu) <= len(captured) // 100
    same = [n for n, tokens in enumerate(captured) if tokens == on_cpu[n]]
    assert all(np.allclose(logprobs[n], expected[n], rtol=1e-3, atol=1e-3) for n in same)


@pytest.mark.parametrize("min_compiled", [0, 10**9])
def test_later_questions_follow_own_answers_as_with_generate(make_run, random_lora, min_compiled):
    asked = Asked(make_run(), random_lora, "fp32")
    chat = asked.session.chat_tokenizer
    records = [replace(one, turns=one.turns * 3) for one in asked.session.records["train"]]
    questions = Questions(asked.session, "train").asking([(record, turn) for record in records for turn in range(3)])
    first = [tokens[1] for tokens in asked.generated()]
    end = max(set(first), key=first.count)
    ended = [np.append(np.array([end], np.int32), dialogue.later[0][1:]) for dialogue in questions.dialogues]
    each = [replace(one, later=(piece, piece)) for one, piece in zip(questions.dialogues, ended, strict=True)]
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=end, decode=lambda ids, **_: "an answer" * (len(ids) > 1))
    ending = SimpleNamespace(image_token_id=chat.image_token_id, merge_size=chat.merge_size, tokenizer=tokenizer)
    asked.session, asked.questions = asked.session.changed(chat_tokenizer=ending), replace(questions, dialogues=each)
    shared = asked.given(SharedPrefixes(asked.session, min_compiled=min_compiled))
    generated = asked.generated()
    shown = [tokens for tokens in shared if tokens[-1] == end and len(tokens) > 1]
    print(f"{len(shared)} answers, {len(shown)} shown: {num_different(shared, generated)} differ")
    assert len(shared) // 10 < len(shown) < len(shared) and num_different(shared, generated) <= len(shared) // 100
