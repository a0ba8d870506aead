"""Each layout of a checkpoint's tensor has its place in the model's parameter; another one is refused."""

from __future__ import annotations

import pytest
import torch

from lookonce.adapter.weights import Change, matrices, placed
from lookonce.errors import ModelError

EXPERTS = {"x.experts.gate_up_proj": (4, 6, 5), "x.experts.down_proj": (4, 5, 3), "x.q_proj.weight": (6, 5)}


@pytest.mark.parametrize(
    ("name", "shape", "parameter", "part"),
    [
        ("x.q_proj.weight", (6, 5), "x.q_proj.weight", lambda whole: whole[0]),
        ("x.experts.gate_up_proj", (4, 6, 5), "x.experts.gate_up_proj", lambda whole: whole),
        ("x.experts.gate_up_proj", (4, 5, 6), "x.experts.gate_up_proj", lambda whole: whole.mT),
        ("x.experts.2.gate_proj.weight", (3, 5), "x.experts.gate_up_proj", lambda whole: whole[2, :3]),
        ("x.experts.2.up_proj.weight", (3, 5), "x.experts.gate_up_proj", lambda whole: whole[2, 3:]),
        ("x.experts.3.down_proj.weight", (5, 3), "x.experts.down_proj", lambda whole: whole[3]),
    ],
)
@pytest.mark.parametrize("is_product", [True, False])
def test_a_known_layout_gets_its_part_of_the_change(name, shape, parameter, part, is_product):
    num_matrices, rows, columns = matrices(EXPERTS[parameter])
    left, right = torch.randn(num_matrices, rows, 2), torch.randn(num_matrices, 2, columns)
    product = 0.5 * left @ right
    whole = Change(left, right, 0.5) if is_product else Change(product)
    change = placed(whole, name, shape, parameter, EXPERTS[parameter])
    wanted = part(product).reshape(matrices(shape))
    for matrix in range(matrices(shape)[0]):
        for first in range(matrices(shape)[1]):
            old = torch.randn(1, matrices(shape)[2])
            added = old if is_product else 0
            assert torch.allclose(change.rows(matrix, first, old), added + wanted[matrix, first], atol=1e-5)


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
        placed(Change(torch.zeros(1, 1, 1)), name, shape, parameter, EXPERTS[parameter])
