"""How well one answer matches the right ones: as a text, as labels, as words, as a point, by text metrics.

docs/metrics.md defines the metrics. Every function takes an answer and its references, of which the best counts. Label
sets keep case and spelling, so `same_labels` differs from `exact` by the order of the labels alone. Words are those of
SQuAD (arXiv 1606.05250). A text of which nothing is left, such as the choice "A", stays as it is, because otherwise an
empty answer would equal it. Two numbers are a point and four a box (left, top, right, bottom; datasets/points.py); the
centre of a box is its point (ScreenSpot, arXiv 2401.10935). Answer and reference must be in the same units.

BLEU, ROUGE, METEOR and chrF need the extra `metrics`: the libraries behind the challenges' own script (`evaluate`),
called directly, since `evaluate` downloads its metrics. All are shares, not percent. Each distinct answer is scored
once, and tokens, stems and synonyms are kept: 9,000 short answers take 2 s, sentences of 20 words about 20 s.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from importlib.metadata import version
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

from lookonce.datasets.points import answer_numbers, reference_numbers
from lookonce.text import nfc

LENIENT = "lenient (substring or 0.7 similarity, as in earlier publications)"
SIMILARITY = 0.7
MAX_SIMILAR = 300
"""Characters of the longest text whose similarity is computed, since that takes time in the square of the length."""
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class Overlap(NamedTuple):
    """The common items of an answer and a reference, as shares."""

    f1: float
    precision: float
    recall: float


def exact(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer equals a reference, apart from spaces around it and Unicode's normal form."""
    return nfc(answer).strip() in {nfc(text).strip() for text in references}


def exact_lower(answer: str, references: Sequence[str]) -> bool:
    """`exact` in lower case, as in the paper of Kvasir-VQA-x1 (arXiv 2506.09958)."""
    return exact(answer.lower(), [text.lower() for text in references])


def is_closed(answer: str) -> bool:
    """Whether a reference is yes or no."""
    return answer.strip().lower() in ("yes", "no")


def labels(text: str) -> set[str]:
    """The labels of an answer, which are separated by semicolons."""
    return {label for part in text.split(";") if (label := part.strip())}


def same_labels(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer has the labels of a reference, in any order."""
    return any(labels(answer) == labels(text) for text in references)


def label_overlap(answer: str, references: Sequence[str]) -> Overlap:
    """The common labels with the reference of the highest F1."""
    return max(overlap(labels(answer), labels(text)) for text in references)


def words(text: str) -> list[str]:
    """The words of a text by SQuAD's normalisation; if that leaves nothing, with its articles, else as they are."""
    lower = text.lower()
    with_articles = lower.translate(PUNCTUATION)
    return ARTICLES.sub(" ", with_articles).split() or with_articles.split() or lower.split()


def word_overlap(answer: str, references: Sequence[str]) -> Overlap:
    """The common words, each counted as often as both texts have it; of each share the highest of any reference."""
    answer_words = words(answer)
    return Overlap(*map(max, zip(*(overlap(answer_words, words(text)) for text in references), strict=True)))


def overlap(answer: Iterable[str], reference: Iterable[str]) -> Overlap:
    """Precision, recall and F1 of common items; without any items, 1 if both have none and else 0."""
    counts, right = Counter(answer), Counter(reference)
    if not counts or not right:
        return Overlap(*[float(counts == right)] * 3)
    common = (counts & right).total()
    return Overlap(2 * common / (counts.total() + right.total()), common / counts.total(), common / right.total())


def lenient(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer contains a reference, lies in one, or is similar to one: "no" is right for "none"."""
    return any(_is_lenient(answer.strip().lower(), text.strip().lower()) for text in references)


def _is_lenient(answer: str, reference: str) -> bool:
    if not answer or not reference:
        return answer == reference
    if answer in reference or reference in answer:
        return True
    if max(len(answer), len(reference)) > MAX_SIMILAR:
        return False
    matcher = SequenceMatcher(None, answer, reference)
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # ever closer to it, and ever slower
    return all(ratio() >= SIMILARITY for ratio in bounds)


Point = tuple[float, float]
Box = tuple[float, float, float, float]


def answer_point(text: str) -> Point | None:
    """The point of an answer: its two numbers, or the centre of its four."""
    numbers = answer_numbers(text)
    if len(numbers) == 4:
        return (numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2
    return (numbers[0], numbers[1]) if numbers else None


def reference_boxes(references: Sequence[str]) -> list[Box]:
    """The references as boxes; empty unless all are."""
    boxes = [reference_numbers(text) for text in references]
    return [(a, b, c, d) for a, b, c, d in boxes] if all(len(numbers) == 4 for numbers in boxes) else []


def reference_points(references: Sequence[str]) -> list[Point]:
    """The references as points; empty unless all are."""
    points = [reference_numbers(text) for text in references]
    return [(x, y) for x, y in points] if all(len(numbers) == 2 for numbers in points) else []


def is_inside(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer's point is in one of the reference boxes, or on its edge."""
    if (point := answer_point(answer)) is None:
        return False
    boxes = [(sorted(box[::2]), sorted(box[1::2])) for box in reference_boxes(references)]
    return any(left <= point[0] <= right and top <= point[1] <= bottom for (left, right), (top, bottom) in boxes)


def distance(answer: str, references: Sequence[str]) -> float | None:
    """The distance to the nearest reference point; None if the answer is not a point."""
    point = answer_point(answer)
    return None if point is None else min(math.dist(point, reference) for reference in reference_points(references))


PACKAGES = {"sacrebleu": "sacrebleu", "rouge_score": "rouge-score", "nltk": "nltk"}
"""Modules and their packages."""
NOT_INSTALLED = "not installed: pip install 'lookonce[metrics]'"
ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
SLOPE, SCALE = 1e-5, 1e9
"""The part of a count by which it is changed to find the derivative of a score; what all counts are multiplied by."""
NO_SYNONYMS = "METEOR (no synonyms)"


def has_text_metrics() -> bool:
    """Whether the extra `metrics` is."""
    return all(importlib.util.find_spec(module) for module in PACKAGES)


def text_metric_libraries() -> str:
    """The packages with their versions, or what to install."""
    if not has_text_metrics():
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
        return {"bleu": "BLEU", **ROUGES, "meteor": self._meteor_name, "chrf": "chrF"}

    def scores(self, answers: Sequence[str]) -> dict[str, float]:
        """The score of a set of answers by each metric."""
        pairs = Counter(zip(answers, self._references, strict=True))
        scored = [(self._scores_of_one(*pair), number) for pair, number in pairs.items()]
        names = (*ROUGES, "meteor")
        means = {name: sum(values[name] * number for values, number in scored) / len(answers) for name in names}
        return {
            "bleu": float(min(self._bleu.corpus_score(answers, None).score / 100, 1)),
            **means,
            "chrf": float(self._chrf.corpus_score(answers, None).score / 100),
        }

    def each(self, answers: Sequence[str], key: str) -> list[float]:
        """What each answer of a set scores by one metric; their mean is the score of the set.

        Those of BLEU and chrF are linearised: the score of the set, plus the number of answers times what the counts of
        the answer add to it by its derivative.
        """
        if key not in ("bleu", "chrf"):
            return [self._scores_of_one(*pair)[key] for pair in zip(answers, self._references, strict=True)]
        metric: Any = self._bleu if key == "bleu" else self._chrf
        counts = [[float(number) for number in of_one] for of_one in metric._extract_corpus_statistics(answers, None)]
        totals = [math.fsum(column) for column in zip(*counts, strict=True)]

        def figure(changed: Sequence[float]) -> float:
            scaled = [SCALE * number for number in changed]  # the score is the same; sacrebleu cuts lengths to integers
            return min(float(metric._compute_score_from_stats(scaled).score) / 100, 1.0)

        score, slopes = figure(totals), [0.0] * len(totals)
        for number, total in enumerate(totals):
            if score and total:
                ends = [figure([*totals[:number], total * (1 + d), *totals[number + 1 :]]) for d in (-SLOPE, SLOPE)]
                slopes[number] = (ends[1] - ends[0]) / (2 * SLOPE * total)
        adds = [len(answers) * math.fsum(map(operator.mul, slopes, of_one)) for of_one in counts]
        return [score + added - math.fsum(adds) / len(adds) for added in adds]

    def _score_one(self, answer: str, references: tuple[str, ...]) -> dict[str, float]:
        rouges = self._rouge.score_multi(references, answer)
        return {name: rouges[name].fmeasure for name in ROUGES} | {"meteor": self._meteor(answer, references)}


def _meteor() -> tuple[Callable[[str, Sequence[str]], float], str]:
    """METEOR of one answer, and its name."""
    from nltk.stem.porter import PorterStemmer
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import meteor_score

    synsets, tokens, stemmer = _synsets(), functools.cache(NLTKWordTokenizer().tokenize), PorterStemmer()
    stemmer.stem = functools.cache(stemmer.stem)
    wordnet = SimpleNamespace(synsets=functools.cache(synsets or (lambda word: [])))

    def score(answer: str, references: Sequence[str]) -> float:
        right = [tokens(text) for text in references]
        return float(meteor_score(right, tokens(answer), stemmer=stemmer, wordnet=wordnet))

    return score, "METEOR" if synsets else NO_SYNONYMS


def _synsets() -> Callable[[str], list[Any]] | None:
    """What NLTK's WordNet knows of a word; None unless its data is whole on this machine."""
    from nltk.corpus import wordnet

    try:
        wordnet.synsets("well")  # a noun, a verb, an adjective and an adverb, so all files are read
    except (LookupError, OSError):
        return None
    synsets: Callable[[str], list[Any]] = wordnet.synsets
    return synsets
