"""The text metrics of the challenges: BLEU, ROUGE, METEOR and chrF. Needs the extra `metrics`.

Design: the libraries behind the challenges' own script (`evaluate`), called directly, since `evaluate` downloads its
metrics. BLEU is the corpus figure over tokens of 13a, case-sensitive and without smoothing; ROUGE is the plain mean of
F without stemming, where `evaluate` takes the median of a bootstrap; METEOR is NLTK's. All are shares, not percent.
Without NLTK's WordNet data METEOR has no synonyms, which its name states; for short answers that changes nothing.
ROUGE and METEOR are computed once for each distinct answer and its references, also if the model and the majority give
the same one; tokens, stems and synonyms once for each text and word.

The cost for 9,000 questions is 2 s for short answers and about 20 s for sentences of 20 words.
"""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

PACKAGES = {"sacrebleu": "sacrebleu", "rouge_score": "rouge-score", "nltk": "nltk"}
"""Modules and their packages."""
NOT_INSTALLED = "not installed: pip install 'lookonce[metrics]'"
ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
NO_SYNONYMS = "METEOR (no synonyms)"


def is_installed() -> bool:
    """Whether the extra `metrics` is."""
    return all(importlib.util.find_spec(module) for module in PACKAGES)


def libraries() -> str:
    """The packages with their versions, or what to install."""
    if not is_installed():
        return NOT_INSTALLED
    return ", ".join(f"{package} {version(package)}" for package in PACKAGES.values())


class TextMetrics:
    """Scores sets of answers to the same questions."""

    def __init__(self, references: Sequence[tuple[str, ...]]) -> None:
        """`references` are the right answers of each question, of which there must be one."""
        from rouge_score.rouge_scorer import RougeScorer
        from rouge_score.tokenizers import DefaultTokenizer
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        streams = list(zip_longest(*references))
        self._references = references
        self._bleu = BLEU(smooth_method="none", force=True, references=streams)
        self._chrf = CHRF(references=streams)
        tokenizer = DefaultTokenizer(use_stemmer=False)
        tokenizer.tokenize = functools.cache(tokenizer.tokenize)
        self._rouge = RougeScorer(list(ROUGES), tokenizer=tokenizer)
        self._meteor, self._meteor_name = _meteor()
        self._scores_of_one = functools.cache(self._score_one)

    @property
    def names(self) -> dict[str, str]:
        """The names of the metrics by their keys."""
        return {"bleu": "BLEU", **ROUGES, "meteor": self._meteor_name, "chrf": "chrF"}

    def scores(self, given: Sequence[str]) -> dict[str, float]:
        """The score of a set of answers by each metric."""
        pairs = Counter(zip(given, self._references, strict=True))
        scored = [(self._scores_of_one(*pair), number) for pair, number in pairs.items()]
        means = {name: sum(one[name] * number for one, number in scored) / len(given) for name in (*ROUGES, "meteor")}
        return {
            "bleu": float(min(self._bleu.corpus_score(given, None).score / 100, 1)),
            **means,
            "chrf": float(self._chrf.corpus_score(given, None).score / 100),
        }

    def _score_one(self, given: str, references: tuple[str, ...]) -> dict[str, float]:
        """ROUGE and METEOR of one answer."""
        rouges = self._rouge.score_multi(references, given)
        return {name: rouges[name].fmeasure for name in ROUGES} | {"meteor": self._meteor(given, references)}


def _meteor() -> tuple[Callable[[str, Sequence[str]], float], str]:
    """METEOR of one answer, and its name."""
    from nltk.stem.porter import PorterStemmer
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import meteor_score

    synonyms, tokens, stemmer = _synonyms(), functools.cache(NLTKWordTokenizer().tokenize), PorterStemmer()
    stemmer.stem = functools.cache(stemmer.stem)

    def score(given: str, references: Sequence[str]) -> float:
        right = [tokens(text) for text in references]
        return float(meteor_score(right, tokens(given), stemmer=stemmer, wordnet=synonyms))

    return score, NO_SYNONYMS if synonyms.is_empty else "METEOR"


class _Synonyms:
    """NLTK's WordNet, each word looked up once; or none, of which no word has synonyms."""

    def __init__(self, wordnet: Any = None) -> None:
        self.is_empty = wordnet is None
        self.synsets = functools.cache(wordnet.synsets if wordnet else lambda word: [])


def _synonyms() -> _Synonyms:
    """Those of NLTK's WordNet if its data is whole on this machine."""
    from nltk.corpus import wordnet

    try:
        wordnet.synsets("well")  # a noun, a verb, an adjective and an adverb, so all files are read
    except (LookupError, OSError):
        return _Synonyms()
    return _Synonyms(wordnet)
