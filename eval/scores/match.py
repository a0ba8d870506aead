"""How well one answer matches the right ones: as a whole text, as a set of labels, as a bag of words.

Design: every function takes an answer and its references, of which the best counts, and changes as little of the texts
as its definition says. The headline is `exact`. Label sets keep case and spelling, so that the difference between
`same_labels` and `exact` is the order of the labels alone. Words are those of SQuAD (Rajpurkar et al. 2016, arXiv
1606.05250): lower case, without punctuation and articles. A text of which nothing is left, such as the choice "A",
stays as it is, because otherwise an empty answer would equal it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

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


def exact(given: str, references: Sequence[str]) -> bool:
    """Whether the answer equals a reference, apart from spaces around it and Unicode's normal form."""
    return nfc(given).strip() in {nfc(text).strip() for text in references}


def exact_lower(given: str, references: Sequence[str]) -> bool:
    """`exact` in lower case, as in the paper of Kvasir-VQA-x1 (arXiv 2506.09958)."""
    return exact(given.lower(), [text.lower() for text in references])


def is_closed(answer: str) -> bool:
    """Whether a reference is yes or no."""
    return answer.strip().lower() in ("yes", "no")


def labels(text: str) -> set[str]:
    """The labels of an answer, which are separated by semicolons."""
    return {label for part in text.split(";") if (label := part.strip())}


def same_labels(given: str, references: Sequence[str]) -> bool:
    """Whether the answer has the labels of a reference, in any order."""
    return any(labels(given) == labels(text) for text in references)


def label_overlap(given: str, references: Sequence[str]) -> Overlap:
    """The common labels with the reference of the highest F1."""
    return max(overlap(labels(given), labels(text)) for text in references)


def words(text: str) -> list[str]:
    """The words of a text by SQuAD's normalisation; the text itself if that leaves nothing."""
    found = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()
    return found or text.lower().split()


def word_overlap(given: str, references: Sequence[str]) -> Overlap:
    """The common words, each counted as often as both texts have it; of each share the highest of any reference.

    F1 is that of SQuAD; recall is how LLaVA-Med scores open answers.
    """
    found = words(given)
    return Overlap(*map(max, zip(*(overlap(found, words(text)) for text in references), strict=True)))


def overlap(given: Iterable[str], reference: Iterable[str]) -> Overlap:
    """Precision, recall and F1 of common items; without any items, 1 if both have none and else 0."""
    found, wanted = Counter(given), Counter(reference)
    if not found or not wanted:
        return Overlap(*[float(found == wanted)] * 3)
    common = (found & wanted).total()
    return Overlap(2 * common / (found.total() + wanted.total()), common / found.total(), common / wanted.total())


def lenient(given: str, references: Sequence[str]) -> bool:
    """Whether the answer contains a reference, lies in one, or is similar to one: "no" is right for "none"."""
    return any(_is_lenient(given.strip().lower(), text.strip().lower()) for text in references)


def _is_lenient(given: str, reference: str) -> bool:
    if not given or not reference:
        return given == reference
    return given in reference or reference in given or _is_similar(given, reference)


def _is_similar(given: str, reference: str) -> bool:
    if max(len(given), len(reference)) > MAX_SIMILAR:
        return False
    matcher = SequenceMatcher(None, given, reference)
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # ever closer to it, and ever slower
    return all(ratio() >= SIMILARITY for ratio in bounds)
