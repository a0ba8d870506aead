"""How many steps and samples a training has."""

from __future__ import annotations

import pytest

from lookonce.study.plan import num_samples


@pytest.mark.parametrize(
    ("train", "found"),
    [
        ({"steps": 5}, (5, 40)),
        ({"steps": 13}, (13, 100)),
        ({"epochs": 2, "steps": None}, (26, 200)),
        ({"steps": 14}, (14, 108)),
    ],
)
def test_the_last_step_of_an_epoch_is_smaller(make_run, train, found):
    assert num_samples(make_run(train=train), 100) == found
