"""Comparisons: who is better, and in which words; seeds count as one; equal and small runs are not distinguishable."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from lookonce.datasets.records import Turn
from lookonce.eval.compare import FEW_IMAGES, Comparison, compare, sentence, to_json, to_text
from lookonce.eval.join import Run
from lookonce.eval.scores.prediction import Prediction

IMAGES, ASKED = 60, 9


def run(name: str, right: np.ndarray, training: str = "", seed: int | None = None, images: int = IMAGES) -> Run:
    return Run(
        name,
        [
            Prediction(
                f"a:{number}", (f"{number % images}.jpg",), f"q{number // images}", "yes", "yes" if one else "no", "no"
            )
            for number, one in enumerate(right)
        ],
        training,
        seed,
    )


def answers(share: float, seed: int = 0) -> np.ndarray:
    """Which questions are answered right: those below a share, nested, so that only the share differs."""
    return np.random.default_rng(seed).permutation(IMAGES * ASKED) < share * IMAGES * ASKED


def sentences(comparison: Comparison) -> list[str]:
    return [sentence(pair, comparison.num_questions) for pair in comparison.pairs]


def test_a_real_difference_is_called_one_whichever_run_is_named_first():
    low, high = run("a", answers(0.8)), run("b", answers(0.87))
    for runs, difference in (([low, high], 0.07), ([high, low], -0.07)):
        comparison = compare(runs)
        [pair], [said] = comparison.pairs, sentences(comparison)
        assert pair.difference == pytest.approx(difference, abs=0.001) and pair.better == "b"
        assert {pair.only_first, pair.only_second} == {0, 38} or (pair.only_first, pair.only_second) == (38, 0)
        assert said.startswith("b answers 7.0 points more questions exactly right than a (95% interval 4.8 to 9.2, p")
        assert said.endswith("p after Holm <0.0001).")


@pytest.mark.guarantee("Two equal runs are reported as not distinguishable.")
def test_equal_runs_are_not_distinguishable():
    comparison = compare([run("a", answers(0.8)), run("a (2)", answers(0.8))])
    [said] = sentences(comparison)
    assert said == "a and a (2) are not distinguishable: both answer the same questions right, of 540."
    assert comparison.pairs[0].p == 1.0
    comparison = compare([run("a", answers(0.8, 1)), run("b", answers(0.81, 2))])
    assert comparison.pairs[0].better is None, "a difference within its interval"
    assert sentences(comparison)[0].startswith(
        "a and b are not distinguishable: b is 1.1 points higher (95% interval -4"
    )


@pytest.mark.parametrize(("images", "is_known"), [(4, False), (5, True)])
def test_few_images_have_no_interval_and_this_is_said(images, is_known):
    one, other = (run(name, answers(share), images=images) for name, share in (("a", 0.8), ("b", 0.95)))
    comparison, text = compare([one, other]), " ".join(to_text(compare([one, other])).split())
    assert comparison.num_images == images and all(bool(one.interval) == is_known for one in comparison.candidates)
    assert (FEW_IMAGES in text) == (not is_known)
    if not is_known:
        assert sentences(comparison) == [f"a and b are not distinguishable: {FEW_IMAGES}."] and "none" in text


def test_p_values_are_corrected_for_the_pairs_that_are_shown():
    runs = [run(name, answers(share)) for name, share in (("a", 0.8), ("b", 0.82), ("c", 0.84))]
    everything, against_first = compare(runs), compare(runs, with_first_only=True)
    assert [(pair.first, pair.second) for pair in everything.pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [(pair.first, pair.second) for pair in against_first.pairs] == [("a", "b"), ("a", "c")]
    assert everything.pairs[0].p == against_first.pairs[0].p
    assert everything.pairs[1].p_holm == pytest.approx(3 * everything.pairs[1].p)


def seeds(name: str, *shares: float, training: str) -> list[Run]:
    return [run(f"{name}-{seed}", answers(share), training, seed) for seed, share in enumerate(shares)]


def test_a_difference_counts_only_if_it_exceeds_the_spread_of_seeds():
    first = seeds("a", 0.80, 0.81, 0.82, training="x")
    near, far = seeds("b", 0.82, 0.83, 0.84, training="y"), seeds("c", 0.86, 0.88, 0.89, training="z")
    comparison = compare([*first, *near, *far])
    assert [one.name for one in comparison.candidates] == ["a-0 (3 seeds)", "b-0 (3 seeds)", "c-0 (3 seeds)"]
    assert comparison.candidates[0].spread == pytest.approx(0.02, abs=0.001)
    assert comparison.candidates[0].exact_match == pytest.approx(0.81, abs=0.001)
    near_pair, far_pair, _ = comparison.pairs
    assert near_pair.interval.low > 0 and near_pair.better is None
    assert "; seeds of one training differ by 2.0 points." in sentences(comparison)[0]
    assert far_pair.better == "c-0 (3 seeds)"


def test_seeds_of_one_training_are_never_better_and_a_copy_with_the_same_seed_is_no_other():
    comparison = compare(seeds("a", 0.8, 0.9, training="x"))
    assert comparison.pairs[0].are_seeds and comparison.pairs[0].better is None
    assert "they are seeds of the same training" in sentences(comparison)[0]
    comparison = compare([run("a", answers(0.8), "x", 1), run("b", answers(0.8), "x", 1)])
    assert not comparison.pairs[0].are_seeds and len(comparison.candidates) == 2


def test_the_text_fits_80_columns_and_the_json_is_json():
    names = [f"a-run-with-a-name-of-some-length-{number}" for number in range(4)]
    comparison = compare([run(name, answers(0.8, number)) for number, name in enumerate(names)])
    assert max(map(len, to_text(comparison).splitlines())) <= 80
    value = json.loads(json.dumps(to_json(comparison), allow_nan=False))
    assert value["pairs"][0]["better"] is None and len(value["pairs"][0]["interval"]) == 2
    assert value["candidates"][0]["name"] == names[0] and len(value["pairs"]) == 6


WORDS = [f"word{number}" for number in range(40)]


def in_sentences(name: str, share: float) -> Run:
    """Questions with references of eight words, of which each answer has about this share."""
    rng, kept = np.random.default_rng(0), np.random.default_rng(int(100 * share))
    one = run(name, np.ones(IMAGES * ASKED))
    truths = np.array(WORDS)[rng.random((IMAGES * ASKED, len(WORDS))).argsort(axis=1)[:, :8]]
    given = np.where(kept.random((IMAGES * ASKED, 8)) < share, truths, "else")
    rows = zip(one.predictions, truths, given, strict=True)
    texts = [replace(row, answer=" ".join(truth), predicted=" ".join(text)) for row, truth, text in rows]
    return replace(one, predictions=texts)


def test_sentences_are_compared_by_their_words_and_exact_match_alone_is_said_to_say_little():
    runs = [in_sentences("a", 0.4), in_sentences("b", 0.6)]
    exact, in_words = compare(runs), compare(runs, metric="token_f1")
    assert exact.is_exact_match_poor and not in_words.is_exact_match_poor
    assert "RUN RUN --metric token_f1" in " ".join(to_text(exact).split())
    [pair], [first, second] = in_words.pairs, in_words.candidates
    assert (first.score, second.score) == (pytest.approx(0.4, abs=0.02), pytest.approx(0.6, abs=0.02))
    assert pair.better == "b" and pair.difference == pytest.approx(second.score - first.score)
    assert (pair.only_first, pair.only_second) == (None, None) and first.exact_match < 0.01
    assert sentences(in_words)[0].startswith(
        f"b scores {100 * pair.difference:.1f} points more F1 of words than a (95%"
    )
    text = to_text(in_words)
    assert "F1 of words" in text.splitlines()[2] and "only one right" not in text
    equal = compare([in_sentences("a", 0.4), in_sentences("c", 0.4)], metric="token_f1")
    assert sentences(equal)[0].startswith("a and c are not distinguishable: their scores are equal (95% interval")


def test_runs_whose_prompts_have_answers_of_different_kinds_are_compared_with_a_note():
    turns = (Turn("before?", "no"),)

    def asked(name: str, whose: str | None) -> Run:
        one = run(name, answers(0.8))
        return replace(one, predictions=[replace(row, earlier=turns, earlier_answers=whose) for row in one.predictions])

    own, true, older = asked("a", "predicted"), asked("b", "reference"), asked("c", None)
    found = compare([own, older])
    assert found.prompts == {"a": "predicted", "c": "reference"}
    assert "different kinds (a: predicted; c: reference)" in " ".join(to_text(found).replace(",", ";").split())
    assert compare([true, older]).prompts == {} and "different kinds" not in to_text(compare([true, older]))
