"""Examples that share their images, so that one pass over the image tokens does for all of them.

Design: a group is what asks about the same images after the same text. Its *prefix* is what all its examples begin
with, through the last image and on into the question as far as they agree; what follows is each example's *branch*. The
prefix ends before the first supervised token of any of them, so it holds nothing to be learned; but its last token
predicts the first token of every branch, which is supervised where the same question was asked twice, or only once.

Tokens are compared as bytes, some microseconds an example. That is exact: one more space before an image makes another
group, which runs the image once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lookonce.train.data.tokenize import Example


@dataclass(frozen=True)
class Group:
    """Examples with the same prefix."""

    examples: tuple[int, ...]
    """Their numbers in the list that they came from."""
    len_prefix: int
    """Tokens that they have in common, each image placeholder counted once, as in `Example.token_ids`."""
    num_prefix_tokens: int
    """The same with placeholders expanded."""
    branch_tokens: tuple[int, ...]
    """How many follow the prefix, expanded, one an example; each at least 1."""

    @property
    def num_tokens(self) -> int:
        """The prefix once and all branches."""
        return self.num_prefix_tokens + sum(self.branch_tokens)

    def part(self, numbers: Sequence[int]) -> Group:
        """Some of its examples, by their place in `examples`; with the prefix of all, were theirs longer or not."""
        examples = tuple(self.examples[number] for number in numbers)
        branch_tokens = tuple(self.branch_tokens[number] for number in numbers)
        return Group(examples, self.len_prefix, self.num_prefix_tokens, branch_tokens)


def group_examples(examples: Sequence[Example], image_token_id: int) -> list[Group]:
    """All examples in groups, in the order in which each group first appears; without images each is one alone."""
    members: dict[object, list[int]] = {}
    for number, example in enumerate(examples):
        shared = (example.image_keys, _through_images(example, image_token_id)) if example.image_keys else number
        members.setdefault(shared, []).append(number)
    return [_group(numbers, [examples[number] for number in numbers], image_token_id) for numbers in members.values()]


def _group(numbers: Sequence[int], examples: Sequence[Example], image_token_id: int) -> Group:
    first = examples[0]
    len_prefix = _len_common(examples) if first.image_keys else 0
    num_images = np.count_nonzero(first.token_ids[:len_prefix] == image_token_id)
    assert num_images == len(first.image_keys), f"{first.origin}: an answer before the last image"
    num_prefix_tokens = len_prefix - len(first.image_keys) + sum(first.num_image_tokens)
    branch_tokens = tuple(example.num_tokens - num_prefix_tokens for example in examples)
    return Group(tuple(numbers), len_prefix, num_prefix_tokens, branch_tokens)


def _through_images(example: Example, image_token_id: int) -> bytes:
    """The tokens up to the last placeholder and the one after it, which ends the image."""
    last = int(np.flatnonzero(example.token_ids == image_token_id)[-1])
    return example.token_ids[: last + 2].tobytes()


def _len_common(examples: Sequence[Example]) -> int:
    """How many tokens all begin with, leaving each its supervised ones and at least one.

    What the first and the last in lexical order have in common, all between them have too: that makes it one comparison
    of two arrays. The order is that of bytes, which does as well as any.
    """
    limit = min(_first_supervised(example) for example in examples)
    rows = [example.token_ids[:limit].tobytes() for example in examples]
    first, last = (np.frombuffer(row, examples[0].token_ids.dtype) for row in (min(rows), max(rows)))
    differs = first != last
    return int(differs.argmax()) if differs.any() else limit


def _first_supervised(example: Example) -> int:
    """Where its first supervised token is; its last token if there is none, as in a question without its answer."""
    first = int(example.supervised.argmax())
    return first if example.supervised[first] else len(example.token_ids) - 1
