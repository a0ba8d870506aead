"""Each layout of a checkpoint's tensor has its place in the model's parameter; another one is refused."""

from __future__ import annotations

import pytest
import torch

from lookonce.adapter.weights import Added, Factors, Place, matrices, place_of
from lookonce.errors import ModelError

EXPERTS = {"x.experts.gate_up_proj": (4, 6, 5), "x.experts.down_proj": (4, 5, 3), "x.q_proj.weight": (6, 5)}


@pytest.mark.parametrize(
    ("name", "shape", "parameter", "expected"),
    [
        ("x.q_proj.weight", (6, 5), "x.q_proj.weight", {}),
        ("x.experts.gate_up_proj", (4, 6, 5), "x.experts.gate_up_proj", {}),
        ("x.experts.gate_up_proj", (4, 5, 6), "x.experts.gate_up_proj", {"is_transposed": True}),
        ("x.experts.2.gate_proj.weight", (3, 5), "x.experts.gate_up_proj", {"expert": 2}),
        ("x.experts.2.up_proj.weight", (3, 5), "x.experts.gate_up_proj", {"expert": 2, "first_row": 3}),
        ("x.experts.3.down_proj.weight", (5, 3), "x.experts.down_proj", {"expert": 3}),
    ],
)
def test_a_known_layout_has_its_place_and_gets_its_part_of_the_product(name, shape, parameter, expected):
    place = place_of(name, shape, parameter, EXPERTS)
    assert place == Place(parameter, **expected)
    num_matrices, rows, columns = matrices(EXPERTS[parameter])
    factors = Factors(torch.randn(num_matrices, rows, 2), torch.randn(num_matrices, 2, columns), 0.5)
    whole = 0.5 * factors.left @ factors.right
    wanted = whole.transpose(1, 2) if place.is_transposed else whole
    if place.expert is not None:
        wanted = wanted[place.expert, place.first_row : place.first_row + shape[0]][None]
    for matrix in range(matrices(shape)[0]):
        for first in range(matrices(shape)[1]):
            old = torch.randn(1, matrices(shape)[2])
            found = Added(lambda: factors)(place, matrix, first, old)
            assert torch.allclose(found, old + wanted[matrix, first], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "parameter"),
    [
        ("x.q_proj.weight", (5, 6), "x.q_proj.weight"),
        ("x.experts.4.gate_proj.weight", (3, 5), "x.experts.gate_up_proj"),
        ("x.experts.1.gate_proj.weight", (6, 5), "x.experts.gate_up_proj"),
        ("x.experts.gate_up_proj", (6, 4, 5), "x.experts.gate_up_proj"),
    ],
)
def test_another_layout_is_refused(name, shape, parameter):
    with pytest.raises(ModelError, match="a layout that cannot be merged into"):
        place_of(name, shape, parameter, EXPERTS)


@pytest.mark.parametrize(
    ("shape", "expected"), [((), (1, 1, 1)), ((7,), (1, 1, 7)), ((2, 3), (1, 2, 3)), ((2, 3, 4), (2, 3, 4))]
)
def test_shapes_are_matrices(shape, expected):
    assert matrices(shape) == expected
