"""Files are read and written in parts as the library does it whole; each layout has its place in a parameter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lookonce.adapter import weights
from lookonce.adapter.weights import Change, Stored, TensorFile, _copied, matrices, tensor_change, write_tensors
from lookonce.cache.store.fingerprint import raw_bytes
from lookonce.errors import ModelError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def tensors(draw):
    names = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=5))
    made = {}
    for number, name in enumerate(names):
        if name != "__metadata__":
            shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
            made[name] = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
    return made


@given(tensors())
def test_what_is_written_the_library_reads_and_the_other_way_round(tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("files")
    save_file(made, folder / "library", {"format": "pt"})
    file = TensorFile(folder / "library")
    assert file.tensors.keys() == made.keys() and file.metadata == {"format": "pt"}
    write_tensors(folder / "ours", file.tensors.values(), file.metadata, lambda one: _copied(file, one))
    found = load_file(folder / "ours")
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_copy_in_blocks_has_all_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "BLOCK_BYTES", 7)
    made = torch.randn(11)
    save_file({"a": made}, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    blocks = [bytes(raw_bytes(block)) for block in _copied(file, file.tensors["a"])]
    assert max(map(len, blocks)) == 7 and b"".join(blocks) == bytes(raw_bytes(made))


def test_tensors_of_larger_values_come_first_so_that_all_are_aligned(tmp_path):
    one = Stored("a", "BF16", (3,), 6)
    made = {"a": torch.ones(3).bfloat16(), "b": torch.ones(2)}
    write_tensors(tmp_path / "file", [one, Stored("b", "F32", (2,), 8)], {}, lambda one: [made[one.name]])
    found = TensorFile(tmp_path / "file").tensors
    assert list(found) == ["b", "a"] and found["b"].offset % 8 == 0


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda content: content[:-4], r"has [\d,]+ of [\d,]+ bytes"),
        (lambda content: content + b"more", r"has [\d,]+ of [\d,]+ bytes"),
        (lambda content: b"\xff" * 8 + content[8:], "cannot read"),
        (lambda content: content.replace(b"data_offsets", b"data_offs_ts"), "cannot read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, says):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(11)}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{says}|{says}.*model\.safetensors"):
        TensorFile(path)


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
    change = tensor_change(whole, name, shape, parameter, EXPERTS[parameter])
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
        tensor_change(Change(torch.zeros(1, 1, 1)), name, shape, parameter, EXPERTS[parameter])
