"""Tokens are drawn with the model's probabilities, from noise that is the same everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from lookonce.eval.decoding.sampling import GAMMA, Chooser, Sampling, _mixed, counter_of, gumbel, noise_of
from lookonce.train.data.tokenize import Example

VOCABULARY, ROWS, CPU = 12, 40_000, torch.device("cpu")
LOGITS = torch.tensor([[2.5, 1.5, 1.4, 1.0, 0.5, 0.6, 0.0, 0.1, -0.5, -1.0, -2.0, -9.0]])
FREQUENCIES = pytest.mark.guarantee("Samples have the frequencies of the model's probabilities.")


def question(*words: int, keys: tuple[str, ...] = ("a",)) -> Example:
    return Example(np.array(words, np.int32), np.zeros(len(words), bool), keys, (4,) * len(keys), "a record")


NOISE = torch.from_numpy(noise_of([question(1)], ROWS, seed=0))


def chi_square_excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """By how many standard deviations chi-square is larger than expected."""
    freedom = np.count_nonzero(expected) - 1
    assert not counts[expected == 0].any()
    kept = expected > 0
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return (statistic - freedom) / (2 * freedom) ** 0.5


@FREQUENCIES
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.05])
def test_frequencies_are_those_of_the_distribution_of_transformers(temperature, top_p):
    choose = Chooser(0, Sampling(1, temperature, top_p))
    token, logprobs = choose(LOGITS.expand(ROWS, -1), torch.tensor([3]), NOISE)
    tempered = TemperatureLogitsWarper(temperature)(None, LOGITS)
    kept = TopPLogitsWarper(top_p)(None, tempered)
    expected = kept[0].double().softmax(0).numpy() * ROWS
    counts = np.bincount(token, minlength=VOCABULARY)
    if top_p > 0.05:
        assert chi_square_excess(counts, expected) < 4
    assert not counts[expected == 0].any()
    stated = torch.stack([each.log_softmax(-1)[0, token] for each in (LOGITS, tempered, kept)], 1)
    assert torch.allclose(logprobs, stated, atol=1e-6)


@FREQUENCIES
@pytest.mark.parametrize("others", ["positions", "samples", "seeds", "questions", "images"])
def test_draws_are_independent_between(others):
    half, zero = ROWS // 2, torch.tensor([0])
    numbers, noise = [zero, zero], [NOISE[:half], NOISE[half:]]
    if others == "positions":
        numbers, noise = [zero, zero + 1], [NOISE, NOISE]
    elif others != "samples":
        asked = {"questions": question(2), "images": question(1, keys=("b",))}.get(others, question(1))
        noise = [NOISE, torch.from_numpy(noise_of([asked], ROWS, seed=int(others == "seeds")))]
    choose = Chooser(0, Sampling(1))
    first, second = (choose(LOGITS.expand(len(n), -1), at, n)[0] for at, n in zip(numbers, noise, strict=True))
    probabilities = LOGITS[0].double().softmax(0).numpy()
    expected = np.outer(probabilities, probabilities)
    frequent = expected > 5 / len(first)
    counts = np.bincount(first * VOCABULARY + second, minlength=VOCABULARY**2).reshape(expected.shape)
    assert chi_square_excess(counts[frequent], expected[frequent] * len(first)) < 4


def test_noise_is_splitmix64():
    """The first numbers of the reference implementation's generator with the seed 1234567."""
    found = _mixed(1234567 + counter_of(5, CPU)).numpy().view(np.uint64)
    assert GAMMA % 2**64 == 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert found.tolist() == [*published, 16408922859458223821]


def test_noise_is_finite_and_has_the_moments_of_gumbel(monkeypatch):
    noise = gumbel(NOISE[:2000], torch.tensor([5]), counter_of(1000, CPU)).double()
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=0.005)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, rel=0.01)
    for extreme in (0, -1):
        monkeypatch.setattr(
            "lookonce.eval.decoding.sampling._mixed", lambda numbers, all_bits=extreme: numbers * 0 + all_bits
        )
        assert gumbel(NOISE[:1], torch.tensor([0]), counter_of(3, CPU)).isfinite().all()


def test_a_token_does_not_depend_on_other_rows_or_on_their_number(monkeypatch):
    choose, at = Chooser(0, Sampling(1, 0.7, 0.9)), torch.tensor([1])
    logits = torch.randn(300, 500, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = choose(logits, at, NOISE[:300])
    order = torch.randperm(300)
    again = choose(logits[order], at, NOISE[:300][order])
    assert torch.equal(again[0], tokens[order]) and torch.equal(again[1], logprobs[order])
    monkeypatch.setattr("lookonce.eval.decoding.sampling.ROWS", 7)
    assert torch.equal(choose(logits, at, NOISE[:300])[0], tokens)


def test_equally_likely_tokens_are_kept_or_left_out_together():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])  # 0.54 and 0.2 for each of the two
    token, logprobs = Chooser(0, Sampling(1, 1.0, 0.6))(logits.expand(ROWS, -1), torch.tensor([0]), NOISE)
    assert {*token.tolist()} == {0, 2, 3}
    assert float(logprobs[:, 2].exp().max()) == pytest.approx(float(logits[0, [0, 2, 3]].softmax(0)[0]))


def test_the_first_samples_are_the_same_of_fewer_and_the_content_alone_counts():
    some, other = question(1, 2), question(1, 3)
    assert noise_of([some, other], 2, 5).tolist() == [*noise_of([some], 3, 5)[:2], *noise_of([other], 2, 5)]
    assert noise_of([replace(some, origin="elsewhere", stage=3)], 1, 5) == noise_of([some], 1, 5)
