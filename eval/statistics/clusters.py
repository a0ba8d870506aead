"""Which questions belong together because they share an image.

Q questions, C clusters, K columns.

Design: answers about one image are right or wrong together, so intervals and tests draw images, not questions. A
question about several images belongs to all of them: questions that are connected by shared images, directly or through
others, are one cluster. Only then are clusters independent; with the first image as the cluster, a question whose
second image is the first of another would be in one and correlated with the other, and intervals would be too short.
The price is that an image that is in every question, such as an atlas page, makes all of them one cluster, and there is
no interval. A question without an image belongs to its record.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Clusters = NDArray[np.intp]
"""The number of each question's cluster, from 0."""


def clusters_of(images: Sequence[Sequence[Hashable]]) -> Clusters:
    """The cluster of each question, from what it shares with others: its images, at least one value each."""
    parent: dict[Hashable, Hashable] = {}

    def root(image: Hashable) -> Hashable:
        while (above := parent.setdefault(image, image)) != image:
            parent[image] = parent[above]
            image = above
        return image

    for shared in images:
        first = root(shared[0])
        for image in shared[1:]:
            parent[root(image)] = first
    numbers: dict[Hashable, int] = {}
    found = [numbers.setdefault(root(shared[0]), len(numbers)) for shared in images]
    return np.array(found, dtype=np.intp)


def totals(values_QK: NDArray[np.float64], clusters: Clusters) -> NDArray[np.float64]:
    """The sum of each column in each cluster."""
    sums_CK = np.zeros((clusters.max(initial=-1) + 1, values_QK.shape[1]))
    np.add.at(sums_CK, clusters, values_QK)
    return sums_CK
