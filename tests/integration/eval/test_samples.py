"""Samples with shared prefixes are those that the stock model gives to each question by itself, with the same noise."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.trainings import compile_anew_by

from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.datasets.sample.model import write_model
from lookonce.eval.answers.engines import SharedPrefixes
from lookonce.eval.decoding.batches import Room, plan_batches
from lookonce.eval.decoding.decoder import Decoder
from lookonce.eval.decoding.dialogue import Dialogue, Sample
from lookonce.eval.decoding.sampling import Chooser, Sampling, noise_of
from lookonce.families.qwen3_5 import QWEN3_5
from lookonce.families.qwen3_vl import QWEN3_VL
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.train.data.batches import Pixels, RowCollator
from lookonce.train.data.packing import group_examples
from lookonce.train.data.tokenize import Example
from lookonce.train.model.compile import num_compiled_graphs, training_on_packs
from lookonce.train.model.load import load_with_tower, load_without_tower

AS_STOCK = pytest.mark.guarantee(
    "Samples have the tokens that the stock model with its tower gives with the same noise, in float32: whatever else "
    "is in the batch, in any order, with `top_p` and temperature, and also through linear attention. Their "
    "log-probabilities are those of the stock model."
)
SEED, NEW_TOKENS = 11, 5
ROOMY = Room(100_000, 100_000, NEW_TOKENS)
WARM, NARROW = Sampling(3, 0.8, max_new_tokens=NEW_TOKENS), Sampling(3, 1.5, 0.7, NEW_TOKENS)


@dataclass
class Asked:
    """Questions, the model without its tower, and the stock one."""

    session: OpenRun
    examples: list[Example]
    model: Any
    stock: Any
    collator: RowCollator
    end: int
    """The end token, as which one serves that some samples have."""

    @property
    def chat(self) -> Any:
        chat = self.session.chat_tokenizer
        names = SimpleNamespace(pad_token_id=0, eos_token_id=self.end, decode=lambda ids, **_: " ".join(map(str, ids)))
        return SimpleNamespace(image_token_id=chat.image_token_id, merge_size=chat.merge_size, tokenizer=names)

    def samples(
        self, chosen: list[int], sampling: Sampling, room: Room = ROOMY, seed: int = SEED, **options: bool
    ) -> dict[int, list[Any]]:
        """The samples of some questions by their numbers, in batches that have room."""
        num, chat = sampling.num_samples, self.chat
        room = replace(room, num_samples=num)
        decoder = Decoder(self.model, chat, self.session.features, room, torch.float32, sampling, **options)
        decoder.seed = seed
        questions = [self.examples[number] for number in chosen]
        behind = [room.max_new_tokens * num] * len(questions)
        batches = plan_batches(questions, behind, chat.image_token_id, room)
        answers = decoder.answers([questions[number] for number in batch] for batch in batches)
        return {
            chosen[number]: given[place * num : (place + 1) * num]
            for batch, given in zip(batches, answers, strict=True)
            for place, number in enumerate(batch)
        }

    def next_logits(self, example: Example, tokens: list[int]) -> np.ndarray:
        """The stock model's logits behind some tokens of an answer, of a row by itself."""
        token_ids = np.append(example.token_ids, np.array(tokens, np.int32)).astype(np.int32)
        row = replace(example, token_ids=token_ids, supervised=np.zeros(len(token_ids), bool))
        with torch.inference_mode():
            return self.stock(**self.collator.prompts([row]), use_cache=False).logits[0, -1].double().numpy()

    def expected(self, number: int, sample: int, sampling: Sampling) -> tuple[list[int], list[list[float]]]:
        """The tokens by the stock model's logits and the noise's definition, and their log-probabilities."""
        tokens: list[int] = []
        logprobs: list[list[float]] = []
        noise = noise_of([self.examples[number]], sampling.num_samples, SEED)[sample]
        while len(tokens) < NEW_TOKENS and self.end not in tokens:
            logits = self.next_logits(self.examples[number], tokens)
            scaled = logits / sampling.temperature
            order = np.argsort(-scaled, kind="stable")
            probabilities = softmax(scaled)[order]
            out = order[np.cumsum(probabilities) - probabilities >= sampling.top_p] if sampling.top_p < 1 else []
            kept = scaled.copy()
            kept[out] = -np.inf
            token = int(np.argmax(kept + gumbel(int(noise), len(tokens), len(logits))))
            tokens.append(token)
            logprobs.append([float(np.log(softmax(each)[token])) for each in (logits, scaled, kept)])
        return tokens, logprobs


def softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def gumbel(noise: int, position: int, size: int) -> np.ndarray:
    """The noise by its definition: two rounds of SplitMix64, in unsigned integers and in float64."""
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mixed(number: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            number = (number ^ number >> shift) * factor & mask
        return number ^ number >> 31

    row = mixed((noise + gamma * (position + 1)) & mask)
    bits = np.array([mixed((row + gamma * (token + 1)) & mask) >> 11 for token in range(size)], float)
    return -np.log(-np.log1p(-(bits * 2.0**-53)))


@pytest.fixture(scope="module", params=[QWEN3_VL, QWEN3_5], ids=lambda family: family.model_type)
def asked(request, sample, make_run_in, random_lora, tmp_path_factory) -> Asked:
    """Three images with one to four questions in turn, two turns, and a question without an image."""
    folder = tmp_path_factory.mktemp("samples")
    model = {}
    if request.param is not QWEN3_VL:
        write_model(folder / "model", family=request.param)
        model = {"path": str(folder / "model")}
    images = [*{record.images: None for record in read_records(sample / "train.jsonl")}][:3]
    asked_of = [*zip(images, (4, 1, 2), strict=True)]
    records = [
        Record(about, (Turn(f"Is it number {n}?", "yes"),)) for n in range(4) for about, num in asked_of if n < num
    ]
    records += [Record(images[2], (Turn("What?", "a"), Turn("Why?", "b"))), Record((), (Turn("Is there text?", "no"),))]
    write_records(folder / "asked.jsonl", records, image_root=sample)
    data = {"train": str(folder / "asked.jsonl"), "val": [], "test": [], "image_root": str(sample)}
    session = open_run(make_run_in(folder, data=data, train={"precision": "fp32"}, model=model), TO_BUILD)
    session.build()
    examples = session.prompts([(one, turn) for one in session.records["train"] for turn in range(len(one.turns))])
    stock, bare = (random_lora(session, load).eval() for load in (load_with_tower, load_without_tower))
    collator = RowCollator(Pixels(session.processor, session.images.path_of), session.chat_tokenizer.image_token_id, 0)
    asked = Asked(session, examples, bare, stock, collator, end=-1)
    seen = asked.samples([*range(len(examples))], WARM)
    asked.end = int(seen[0][0].token_ids[2])
    return asked


@AS_STOCK
@pytest.mark.parametrize("sampling", [WARM, NARROW], ids=["temperature", "top_p"])
def test_samples_are_those_of_the_stock_model_in_rows_of_their_own(asked, sampling):
    found = asked.samples([*range(len(asked.examples))], sampling)
    num_ended = num_compared = 0
    for number in (0, 3, 4, 7, 8, 9):
        for sample, answer in enumerate(found[number]):
            if asked.session.chat_tokenizer.image_token_id in answer.token_ids:
                continue  # the stock model wants an image for it in a prompt
            tokens, logprobs = asked.expected(number, sample, sampling)
            assert answer.token_ids == tuple(tokens)
            assert (answer.ended == "stop") == (tokens[-1] == asked.end)
            stated = np.stack([answer.logprobs, answer.tempered, answer.sampled], 1)
            assert np.allclose(stated, logprobs, rtol=1e-5, atol=1e-5)
            assert answer.logprob == pytest.approx(sum(answer.logprobs))
            num_ended += answer.ended == "stop"
            num_compared += 1
    assert num_compared > 12 and (num_ended or sampling is NARROW)
    assert len({answer.token_ids for each in found.values() for answer in each}) > 20


@AS_STOCK
@pytest.mark.filterwarnings("default:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("room", "by_rows"),
    [(Room(700, 300, NEW_TOKENS, 7), False), (Room(1, 1, NEW_TOKENS), False), (Room(900, 60, NEW_TOKENS), True)],
)
def test_samples_are_the_same_in_other_batches_orders_ways_and_numbers(asked, room, by_rows):
    every = [*range(len(asked.examples))]
    found = {number: [one.token_ids for one in each] for number, each in asked.samples(every, WARM).items()}
    assert any(asked.end in tokens for each in found.values() for tokens in each)
    for chosen, num_samples in ((every[::-1], 3), (every[1::2], 2), (every[:4], 5)):
        again = asked.samples(chosen, replace(WARM, num_samples=num_samples), room, by_rows=by_rows)
        assert sorted(again) == sorted(chosen)
        for number, answers in again.items():
            few = min(num_samples, 3)
            assert [one.token_ids for one in answers][:few] == found[number][:few]
    other = asked.samples(every, WARM, seed=SEED + 1)
    assert sum([one.token_ids for one in other[number]] == found[number] for number in every) < len(every) / 3


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
@pytest.mark.filterwarnings("default")  # the compiler warns
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_compiled_draws_are_those_that_are_not(top_p):
    """As on a GPU, where numbers of int64 could become indices of fewer bits."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3000, generator=random)
    noise = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 40))
    inputs = (logits, torch.tensor([2]), noise)
    with torch.inference_mode():
        chosen = [Chooser(0, Sampling(1, 0.8, top_p), compiled=compiled)(*inputs) for compiled in (False, True)]
    assert torch.equal(chosen[0][0], chosen[1][0]) and len({*chosen[0][0].tolist()}) > 30
    assert torch.allclose(chosen[0][1], chosen[1][1], atol=1e-5)


def test_an_image_and_a_question_are_computed_once_for_all_samples(asked):
    about_first = [
        number for number, one in enumerate(asked.examples) if one.image_keys == asked.examples[0].image_keys
    ]
    computed = []
    hook = asked.model.register_forward_pre_hook(
        lambda module, args, inputs: computed.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        asked.samples(about_first, replace(WARM, num_samples=40))
    finally:
        hook.remove()
    [group] = group_examples([asked.examples[n] for n in about_first], asked.session.chat_tokenizer.image_token_id)
    assert (
        computed[0] == group.num_tokens
        and computed[1] <= 4 * 40 == len(about_first) * 40
        and len(computed) == NEW_TOKENS
    )


@pytest.mark.guarantee("Samples have the frequencies of the model's probabilities.")
def test_first_and_second_tokens_have_the_frequencies_of_the_stock_models_probabilities(asked):
    sampling = Sampling(4000, max_new_tokens=2)
    asked_once = replace(asked, end=-1).samples([0], sampling, replace(ROOMY, max_new_tokens=2))
    tokens = np.array([answer.token_ids for answer in asked_once[0]])
    most = np.bincount(tokens[:, 0]).argmax()
    for drawn, before in ((tokens[:, 0], []), (tokens[tokens[:, 0] == most, 1], [int(most)])):
        expected = softmax(asked.next_logits(asked.examples[0], before)) * len(drawn)
        counts = np.bincount(drawn, minlength=len(expected))
        order = np.argsort(-expected)
        few = max(len(expected) // 100, 1)
        cells = [order[start : start + few] for start in range(0, len(order), few)]
        cells = [cell for cell in cells if expected[cell].sum() >= 5]
        assert len(cells) > 5
        chi_square = sum((counts[cell].sum() - expected[cell].sum()) ** 2 / expected[cell].sum() for cell in cells)
        assert abs(chi_square - len(cells)) < 4 * (2 * len(cells)) ** 0.5


def test_an_engine_gives_the_samples_of_all_questions_in_order(asked):
    opened = asked.session.changed(chat_tokenizer=asked.chat)
    engine = SharedPrefixes(opened, WARM)
    engine.room = replace(engine.room, num_slots=200)
    assert len(engine.plan([Dialogue(example) for example in asked.examples])) > 1
    expected = asked.samples([*range(len(asked.examples))], WARM)
    for seed in (SEED + 1, SEED):
        found = engine.samples(asked.model, asked.examples, seed)
    assert all(isinstance(one, Sample) for each in found for one in each)
    assert [[one.token_ids for one in each] for each in found] == [
        [one.token_ids for one in expected[number]] for number in range(len(found))
    ]


@pytest.mark.filterwarnings("default")  # the compiler warns
def test_later_draws_within_a_training_compile_nothing(asked, monkeypatch):
    """Each step of a training by rewards leaves the model in training mode, and begins anew to draw."""
    if asked.session.model_folder.family is not QWEN3_VL:
        pytest.skip("one family is enough")
    compiled = compile_anew_by(monkeypatch, "eager")
    engine = SharedPrefixes(asked.session.changed(chat_tokenizer=asked.chat), WARM, min_compiled=0)
    engine._on_gpu = True
    expected, numbers = asked.samples([*range(len(asked.examples))], WARM), []
    try:
        with training_on_packs(asked.model, compiled=True):
            for _ in range(2):
                asked.model.train()
                found = engine.samples(asked.model, asked.examples, SEED)
                assert [[one.token_ids for one in each] for each in found] == [
                    [one.token_ids for one in expected[number]] for number in range(len(found))
                ]
                assert not any(module.training for module in asked.model.modules())
                numbers.append((len(compiled), num_compiled_graphs()))
    finally:
        asked.model.eval()
    assert numbers[0][1] > 0 and numbers[0] == numbers[1]
