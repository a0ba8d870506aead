"""The text metrics: their published definitions, computed here by hand, and what is unusual about them."""

from __future__ import annotations

import math

import pytest

from lookonce.eval.scores import match
from lookonce.eval.scores.match import TextMetrics

pytestmark = [
    pytest.mark.skipif(not match.has_text_metrics(), reason=f"the extra `metrics` is {match.NOT_INSTALLED}"),
    pytest.mark.guarantee("Metrics have the values of their published definitions, also on real answers."),
]


def scores(*pairs: tuple[str, str]) -> dict[str, float]:
    given, references = zip(*pairs, strict=True)
    return TextMetrics([(text,) for text in references]).scores(given)


def test_bleu_is_the_geometric_mean_of_the_corpus_precisions():
    found = scores(
        ("the polyp is small and red", "the polyp is small and pink"), ("there is no text", "there is a text")
    )
    # Of 1-grams match 5 of 6 and 3 of 4; of 2-grams 4 of 5 and 1 of 3; of 3-grams 3 of 4 and 0 of 2; of 4-grams 2 of 3
    # and 0 of 1. Both texts are as long as their references, so there is no brevity penalty.
    by_hand = (8 / 10 * 5 / 8 * 3 / 6 * 2 / 4) ** (1 / 4)
    assert found["bleu"] == pytest.approx(by_hand) and round(by_hand, 4) == 0.5946
    short = scores(("one two three four", "one two three four five six"))
    assert short["bleu"] == pytest.approx(math.exp(1 - 6 / 4)), "the brevity penalty"
    assert scores(("Yes, it is.", "Yes , it is ."))["bleu"] == 1
    assert scores(("yes it is so", "YES IT IS SO"))["bleu"] == 0


def test_rouge_is_the_mean_f_of_common_ngrams_and_of_the_longest_common_subsequence():
    found = scores(("Red, small polyp.", "a small red polyp"), ("none", "none"))
    # "red small polyp" and "a small red polyp": 3 common words; of 2 and 3 pairs none; the longest subsequence is 2.
    assert found["rouge1"] == pytest.approx((2 * 3 / (3 + 4) + 1) / 2)
    assert found["rouge2"] == 0  # a single word has no pairs
    assert found["rougeL"] == pytest.approx((2 * 2 / (3 + 4) + 1) / 2)


def test_meteor_weighs_recall_and_punishes_chunks():
    def meteor(matches: int, given: int, wanted: int, chunks: int) -> float:
        precision, recall = matches / given, matches / wanted
        mean = precision * recall / (0.9 * precision + 0.1 * recall)
        return mean * (1 - 0.5 * (chunks / matches) ** 3)

    assert scores(("none", "none"))["meteor"] == pytest.approx(meteor(1, 1, 1, 1)) == pytest.approx(0.5)
    assert scores(("paris ip", "paris ip"))["meteor"] == pytest.approx(0.9375)
    # polyps matches polyp by its stem; "a small" and "polyp" are two chunks
    assert scores(("a small polyps", "a small red polyp"))["meteor"] == pytest.approx(meteor(3, 3, 4, 2))
    assert scores(("yes", "no"))["meteor"] == 0


def test_chrf_is_the_f2_of_character_ngrams():
    # abc and abd: 2 of 3 characters, 1 of 2 pairs, 0 of 1 triple; both are as long, so F is the mean precision.
    assert scores(("abc", "abd"))["chrf"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)


def test_the_best_of_several_references_counts():
    found = TextMetrics([("paris is now here", "none"), ("yes",)]).scores(["none", "yes"])
    assert found["rouge1"] == found["chrf"] == 1 and found["meteor"] == 0.5


@pytest.mark.parametrize("hostile", ["", "\ud800", "? " * 5_000])
def test_hostile_answers_have_scores(hostile):
    found = scores((hostile, "a red polyp"), ("a red polyp", hostile), (hostile, hostile))
    assert all(0 <= value <= 1 for value in found.values())


def test_meteor_says_that_it_has_no_synonyms_without_wordnet(monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    assert TextMetrics([("yes",)]).names["meteor"] == "METEOR (no synonyms)"


def test_with_wordnet_synonyms_match(monkeypatch):
    class Lemma:
        def name(self):
            return "growth"

    class Synset:
        def lemmas(self):
            return [Lemma()]

    class WordNet:
        def synsets(self, word):
            return [Synset()] if word == "polyp" else []

    monkeypatch.setattr("nltk.corpus.wordnet", WordNet())
    metrics = TextMetrics([("growth",)])
    assert metrics.names["meteor"] == "METEOR" and metrics.scores(["polyp"])["meteor"] == 0.5
