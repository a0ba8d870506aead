"""Words that look like misspellings of other words in the same files.

The rule: two words of at least five letters differ by one letter, left out, added or replaced before the last two
letters, which inflection changes, and one of them is 20 times as frequent as the other. Or they differ by two swapped
neighbours, which real words hardly do: then the word with more relatives is right, where words that differ only by a
final "s" are relatives. "instrumnets" is in more rows of Kvasir-VQA than "instruments", but "instrument" occurs too.

Design: no dictionary, since none knows "oesophagitis", and no list of known typos; only the words of the files. Each
word is filed under every string that leaves out one of its letters, and words under the same string are compared. So
the work grows with the number of words and not with its square (https://github.com/wolfgarbe/SymSpell). Only the
`MAX_WORDS` most frequent words are compared. The result is only a hint: "affect" and "effect" are both words.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations

from lookonce.datasets.audit.findings import Finding, Item, findings_from
from lookonce.text import count, quoted

WORD = re.compile(r"[^\W\d_]+")
MIN_LETTERS, MAX_LETTERS = 5, 40
INFLECTION = 2
"""The number of letters at the end of a word that inflection changes."""
MIN_RATIO = 20
"""A word must be this many times as frequent as its misspelling."""
MAX_WORDS = 50_000
NUM_TEXTS = 3
"""An item names this many texts in which the word occurs."""


def find_misspellings(questions: Mapping[str, int], answers: Mapping[str, int]) -> list[Finding]:
    """Find likely misspellings in questions and answers, given as texts and how often each occurs."""
    texts = Counter(questions)
    texts.update(answers)
    words = count_words(texts)
    items: list[Item] = [
        {"word": wrong, "count": words[wrong], "like": right, "like_count": words[right], "texts": []}
        for wrong, right in look_alikes(dict(words.most_common(MAX_WORDS)))
    ]
    items.sort(key=lambda item: -item["count"])
    _add_texts(items, texts)
    bound = f" (of {len(words):,} words the {MAX_WORDS:,} most frequent)" if len(words) > MAX_WORDS else ""
    says = f"{count(len(items), 'word')} that may be misspelt{bound}"
    return findings_from("spelling", "warning", items, says, _example)


def count_words(texts: Mapping[str, int]) -> Counter[str]:
    """Count the texts with each word; words are in lower case."""
    words: Counter[str] = Counter()
    for text, number in texts.items():
        for word in _words_of(text):
            words[word] += number
    return words


def look_alikes(words: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a word that looks misspelt and the word that it looks like."""
    relatives: Counter[str] = Counter()
    for word, number in words.items():
        relatives[word.removesuffix("s")] += number
    for one, other in _near(words):
        wrong, right = sorted((one, other), key=lambda word: relatives[word.removesuffix("s")])
        ratio = relatives[right.removesuffix("s")] / relatives[wrong.removesuffix("s")]
        if is_swap(wrong, right) and ratio > 1 or is_slip(wrong, right) and words[right] >= MIN_RATIO * words[wrong]:
            yield wrong, right


def is_swap(one: str, other: str) -> bool:
    """Whether the words differ by two swapped neighbours."""
    start = _num_common(one, other)
    swapped = one[:start] + one[start + 1 : start + 2] + one[start : start + 1] + one[start + 2 :]
    return one != other and swapped == other


def is_slip(one: str, other: str) -> bool:
    """Whether the words differ by one letter, and not in their last letters."""
    if len(one) < len(other):
        one, other = other, one
    start = _num_common(one, other)
    rest = other[start:] if len(one) > len(other) else other[start + 1 :]
    return one != other and one[start + 1 :] == rest and start < len(one) - INFLECTION


def _near(words: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield all pairs that differ by one letter or a swap, and a few others."""
    filed: dict[str, list[str]] = defaultdict(list)
    for word in words:
        for left in {word, *(word[:index] + word[index + 1 :] for index in range(len(word)))}:
            filed[left].append(word)
    pairs = {(min(pair), max(pair)) for met in filed.values() if len(met) > 1 for pair in combinations(met, 2)}
    yield from sorted(pairs)


def _num_common(one: str, other: str) -> int:
    """Count the letters that both words begin with."""
    return len(os.path.commonprefix([one, other]))


def _words_of(text: str) -> set[str]:
    return {word for word in WORD.findall(text.casefold()) if MIN_LETTERS <= len(word) <= MAX_LETTERS}


def _add_texts(items: list[Item], texts: Counter[str]) -> None:
    """Add to each item the most frequent texts with its word."""
    found = {item["word"]: item["texts"] for item in items}
    for text, _ in texts.most_common() if items else ():
        for word in found.keys() & _words_of(text):
            if len(found[word]) < NUM_TEXTS:
                found[word].append(text)


def _example(item: Item) -> str:
    return (
        f"{quoted(item['word'])} ({item['count']:,}) looks like a misspelling of {quoted(item['like'])} "
        f"({item['like_count']:,}): {quoted(item['texts'][0])}"
    )
