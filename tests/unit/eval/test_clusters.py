"""Questions that share an image, directly or through others, are one cluster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.eval.statistics import clusters_of, totals


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ([], []),
        (["a", "b", "a"], [0, 1, 0]),
        (["ab", "c", "b"], [0, 1, 0]),
        (["a", "b", "c", "bc", "ab"], [0, 0, 0, 0, 0]),
        (["ab", "cd", "ef", "da"], [0, 0, 1, 0]),
    ],
)
def test_connected_questions_are_one_cluster(images, expected):
    assert clusters_of(images).tolist() == expected


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3), min_size=1, max_size=20))
def test_clusters_share_no_image_and_cannot_be_split(images):
    clusters = clusters_of(images)
    seen = {}
    for number, cluster in enumerate(clusters):
        seen.setdefault(cluster, set()).update(images[number])
    everything = [image for some in seen.values() for image in some]
    assert len(everything) == len(set(everything))
    for cluster in seen:  # what is reached from the first question is the whole cluster
        mine = [set(images[number]) for number in np.flatnonzero(clusters == cluster)]
        reached = mine[0]
        for _ in mine:
            reached = reached.union(*(one for one in mine if one & reached))
        assert reached == seen[cluster]


def test_totals_are_sums_by_cluster():
    values = np.array([[1.0, 0.5], [2.0, 0.5], [4.0, 0.0]])
    assert totals(values, clusters_of(["a", "b", "a"])).tolist() == [[5.0, 0.5], [2.0, 0.5]]
