"""Which questions are prepared together, so that each image is encoded once and few are in memory.

Design: a *round* has questions about some images, as many as fit. Questions about the same images are in one round
wherever they stand in the records, so their answers share the images' tokens. Rounds follow from the questions alone.
An image that is shown together with several others may be needed by several rounds; it stays in memory until the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

ROUND_TOKENS = 131_072
"""The most image tokens of a round; their features take 4.3 GB with an 8B."""
Keys = tuple[str, ...]


def plan_rounds(keys_of: Mapping[int, Keys], tokens_of: Callable[[str], int]) -> list[list[int]]:
    """The numbers of the questions of each round.

    `keys_of` has the keys of each question's images, and `tokens_of` gives the number of an image's tokens.
    """
    about: dict[Keys, list[int]] = {}
    for number, keys in keys_of.items():
        about.setdefault(keys, []).append(number)
    rounds: list[list[int]] = []
    inside: set[str] = set()
    free = 0
    for keys, numbers in about.items():
        needed = sum(map(tokens_of, {*keys} - inside))
        if needed > free or not rounds:
            rounds.append([])
            inside, free = set(), ROUND_TOKENS
            needed = sum(map(tokens_of, {*keys}))
        rounds[-1] += numbers
        inside |= {*keys}
        free = max(free - needed, 0)
    return rounds
