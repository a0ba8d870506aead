"""Group examples that share their images, so that one forward pass over the image tokens serves all of them.

Design: a group has examples about the same images after the same text. Its *prefix* is the tokens that all its examples
begin with: through the last image, and into the question as far as they agree. The rest of each example is its
*branch*. The prefix ends before the first supervised token of any example, so it contains no target. But its last token
predicts the first token of every branch, which is a target if all examples ask the same question or there is only one.
A branch ends with the token that its last target is predicted from. That target and what follows it, such as the end of
the turn and a line break, are attended to by no target, so without them every loss and gradient is the same.

Branches may begin alike too: with the answers to earlier questions (`data.context`), or with the same words. `nested`
finds this: of a group in lexical order, each branch shares its first tokens with the branch before it, and they go
through the model once. So prefixes have any number of levels: images, then earlier answers, then a question. The law is
that of one level, and what is shared of some members follows from what neighbours share, without another comparison.

Examples of two lessons are in two groups, because a group is trained on together.

Tokens are compared as bytes, which takes some microseconds per example. The comparison is exact: one more space before
an image makes another group, and the image is processed once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lookonce.train.data.tokenize import Example


@dataclass(frozen=True)
class Group:
    """Examples with the same prefix."""

    examples: tuple[int, ...]
    """Indices of the examples in the list that was grouped."""
    len_prefix: int
    """Length of the prefix with one placeholder per image, as in `Example.token_ids`."""
    num_prefix_tokens: int
    """Length of the prefix with placeholders expanded."""
    branch_tokens: tuple[int, ...]
    """Length of each example's branch, at least 1; all of it, if the example has no target."""
    lesson: int = 0
    """The lesson of its examples."""
    shared_tokens: tuple[int, ...] = ()
    """How many tokens each branch shares with the branch before it, 0 for the first; empty if none shares any."""

    @property
    def num_tokens(self) -> int:
        """Length of the prefix and of all branches, with what is shared once."""
        return self.num_prefix_tokens + sum(self.branch_tokens) - sum(self.shared_tokens)

    def subset(self, members: Iterable[int]) -> Group:
        """Some of the examples, by their positions in `examples`, in the order of the group.

        The prefix stays, even if they share a longer one.
        """
        chosen = sorted(members)
        return replace(
            self,
            examples=tuple(self.examples[member] for member in chosen),
            branch_tokens=tuple(self.branch_tokens[member] for member in chosen),
            shared_tokens=self._shared(chosen) if self.shared_tokens else (),
        )

    def whole(self, examples: Sequence[Example]) -> Group:
        """The group with branches that end where the examples do, as in padded rows."""
        lengths = (examples[index].num_tokens - self.num_prefix_tokens for index in self.examples)
        return replace(self, branch_tokens=tuple(lengths))

    def _shared(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """Two branches of a sorted group share the least that any neighbours between them share."""
        return (0, *(min(self.shared_tokens[before + 1 : this + 1]) for before, this in pairwise(chosen)))


def group_examples(examples: Sequence[Example], image_token_id: int) -> list[Group]:
    """All examples in groups, ordered by each group's first example. An example without images is a group by itself."""
    members: dict[object, list[int]] = {}
    placeholder = np.array(image_token_id, examples[0].token_ids.dtype).tobytes() if examples else b""
    for index, example in enumerate(examples):
        through_images = _through_images(example, placeholder) if example.image_keys else index
        shared = (example.lesson, example.image_keys, through_images)
        members.setdefault(shared, []).append(index)
    return [_group(indices, [examples[index] for index in indices], image_token_id) for indices in members.values()]


def _group(indices: Sequence[int], examples: Sequence[Example], image_token_id: int) -> Group:
    first = examples[0]
    len_prefix = _len_prefix(examples) if first.image_keys else 0
    num_images = np.count_nonzero(first.token_ids[:len_prefix] == image_token_id)
    assert num_images == len(first.image_keys), f"{first.origin}: an answer before the last image"
    num_prefix_tokens = len_prefix - len(first.image_keys) + sum(first.num_image_tokens)
    branch_tokens = tuple(_num_needed(example) - len_prefix for example in examples)
    return Group(tuple(indices), len_prefix, num_prefix_tokens, branch_tokens, first.lesson)


def nested(group: Group, examples: Sequence[Example]) -> Group:
    """The group with its branches in lexical order, and what each shares with the one before it.

    As in the prefix, no target is shared, and each branch keeps at least one token.
    """
    rows = [
        examples[index].token_ids[group.len_prefix : _first_supervised(examples[index])].tobytes()
        for index in group.examples
    ]
    members = sorted(range(len(rows)), key=rows.__getitem__)
    dtype = examples[group.examples[0]].token_ids.dtype
    shared = [_len_common(rows[before], rows[this], dtype) for before, this in pairwise(members)]
    return replace(
        group,
        examples=tuple(group.examples[member] for member in members),
        branch_tokens=tuple(group.branch_tokens[member] for member in members),
        shared_tokens=(0, *shared) if any(shared) else (),
    )


def _through_images(example: Example, placeholder: bytes) -> bytes:
    """The tokens up to the last placeholder and the token after it, which ends the image."""
    token_ids, size = example.token_ids.tobytes(), len(placeholder)
    last = token_ids.rfind(placeholder)
    while last % size:  # bytes of two other tokens
        last = token_ids.rfind(placeholder, 0, last + size - 1)
    return token_ids[: last + 2 * size]


def _len_prefix(examples: Sequence[Example]) -> int:
    """The number of leading tokens that all examples share; each keeps at least one token, and all its targets.

    Tokens shared by the first and the last example in lexical order are shared by all examples between them, so one
    comparison of two arrays suffices. Any order will do; here it is that of the bytes.
    """
    limit = min(_first_supervised(example) for example in examples)
    rows = [example.token_ids[:limit].tobytes() for example in examples]
    return _len_common(min(rows), max(rows), examples[0].token_ids.dtype)


def _len_common(one: bytes, other: bytes, dtype: np.dtype[Any]) -> int:
    """The number of leading tokens that two rows share."""
    size = min(len(one), len(other)) // dtype.itemsize
    differs = np.frombuffer(one, dtype, size) != np.frombuffer(other, dtype, size)
    return int(differs.argmax()) if differs.any() else size


def _num_needed(example: Example) -> int:
    """The number of leading tokens that targets are predicted from, with one placeholder per image; more than those
    before the first target, so that no branch is empty. All of them if there are no targets."""
    if not example.supervised.any():
        return len(example.token_ids)
    last = len(example.supervised) - 1 - int(example.supervised[::-1].argmax())
    return max(last, _first_supervised(example) + 1)


def _first_supervised(example: Example) -> int:
    """The index of the first supervised token, or of the last token if none is, as in a question without an answer."""
    first = int(example.supervised.argmax())
    return first if example.supervised[first] else len(example.token_ids) - 1
