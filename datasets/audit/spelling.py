"""Words that look like misspellings of other words of the same files.

The rule: two words of at least five letters that differ by one letter, left out, put in or replaced before the last
two, where inflections are; and one of them is twenty times as frequent as the other. Or that differ by two neighbours
changed round, which real words hardly do: then the one with more relatives is right, words that differ by a final
"s" being related. "instrumnets" is in more rows of Kvasir-VQA than "instruments", but "instrument" is there too.

Design: no dictionary, since none knows "oesophagitis", and no list of known typos: only what the files say themselves.
Each word is filed under all that is left of it without one letter; words that meet there are compared, so the work
grows with the number of words and not with its square (https://github.com/wolfgarbe/SymSpell). Of more than `MAX_WORDS`
different words the most frequent are looked at. It only ever hints: "affect" and "effect" are both words.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations

from lookonce.datasets.audit.findings import Finding, Item, find
from lookonce.text import count, quoted

WORD = re.compile(r"[^\W\d_]+")
MIN_LETTERS, MAX_LETTERS = 5, 40
INFLECTION = 2
"""Letters at the end of a word that grammar changes."""
TIMES = 20
MAX_WORDS = 50_000
NUM_TEXTS = 3
"""In which a word occurs, that an item names."""


def find_misspellings(questions: Mapping[str, int], answers: Mapping[str, int]) -> list[Finding]:
    """Words of questions and answers (texts and how often each occurs) that look like others' misspellings."""
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
    return find("spelling", "warning", items, says, _example)


def count_words(texts: Mapping[str, int]) -> Counter[str]:
    """In how many texts each word is, in lower case."""
    words: Counter[str] = Counter()
    for text, number in texts.items():
        for word in _words_of(text):
            words[word] += number
    return words


def look_alikes(words: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs of a word that looks misspelt and the one it looks like."""
    relatives: Counter[str] = Counter()
    for word, number in words.items():
        relatives[word.removesuffix("s")] += number
    for one, other in _near(words):
        wrong, right = sorted((one, other), key=lambda word: relatives[word.removesuffix("s")])
        times = relatives[right.removesuffix("s")] / relatives[wrong.removesuffix("s")]
        if is_swap(wrong, right) and times > 1 or is_slip(wrong, right) and words[right] >= TIMES * words[wrong]:
            yield wrong, right


def is_swap(one: str, other: str) -> bool:
    """Whether they differ by two neighbours that have changed places."""
    start = _num_common(one, other)
    swapped = one[:start] + one[start + 1 : start + 2] + one[start : start + 1] + one[start + 2 :]
    return one != other and swapped == other


def is_slip(one: str, other: str) -> bool:
    """Whether they differ by one letter, and not at the end."""
    if len(one) < len(other):
        one, other = other, one
    start = _num_common(one, other)
    rest = other[start:] if len(one) > len(other) else other[start + 1 :]
    return one != other and one[start + 1 :] == rest and start < len(one) - INFLECTION


def _near(words: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs that become the same without a letter each, or without one of the longer's; some more besides."""
    filed: dict[str, list[str]] = defaultdict(list)
    for word in words:
        for left in {word, *(word[:place] + word[place + 1 :] for place in range(len(word)))}:
            filed[left].append(word)
    pairs = {(min(pair), max(pair)) for met in filed.values() if len(met) > 1 for pair in combinations(met, 2)}
    yield from sorted(pairs)


def _num_common(one: str, other: str) -> int:
    """How many letters both begin with."""
    return len(os.path.commonprefix([one, other]))


def _words_of(text: str) -> set[str]:
    return {word for word in WORD.findall(text.casefold()) if MIN_LETTERS <= len(word) <= MAX_LETTERS}


def _add_texts(items: list[Item], texts: Counter[str]) -> None:
    """The most frequent texts with each word."""
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
