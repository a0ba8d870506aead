"""A merge reads and writes weights in parts as the library does it whole, and changes configuration and index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lookonce.adapter import weights
from lookonce.adapter.merge import check_frozen, copy_other_files
from lookonce.adapter.weights import (
    Change,
    Plan,
    Planned,
    Stored,
    TensorFile,
    _copied,
    matrices,
    tensor_change,
    write_tensors,
)
from lookonce.cache.store.fingerprint import raw_bytes
from lookonce.errors import ModelError, UsageError

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
    path.unlink()
    with pytest.raises(ModelError, match=f"cannot read {path}"):
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


# What beside the weights goes into a merged folder.


def model_folder(folder: Path, config: dict, *files: str, index: dict | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", *files):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    (tmp_path / "merged").mkdir()
    return tmp_path / "merged"


def plan_of(**names: str) -> Plan:
    """A plan with one tensor of 8 bytes each, in files."""
    files: dict[str, list[Planned]] = {}
    for name, file in names.items():
        stored = Stored(name, "F32", (2,), 8)
        files.setdefault(f"{file}.safetensors", []).append(Planned(stored, stored))
    return Plan(files, is_untied="lm_head" in names)


def test_files_behind_links_are_copied_and_not_linked(tmp_path, merged):
    """A model of the Hub is a folder of links."""
    real = model_folder(tmp_path / "real", {"a": 1}, "LICENSE")
    (tmp_path / "model").mkdir()
    for path in real.iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    copy_other_files(tmp_path / "model", merged, Plan({}), None)
    copied = merged / "LICENSE"
    assert not copied.is_symlink() and copied.read_bytes() == (real / "LICENSE").read_bytes()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}),
        ({"text_config": {"dtype": "bfloat16"}}, {"text_config": {"dtype": "float32"}, "dtype": "float32"}),
        ({}, {"dtype": "float32"}),
    ],
)
def test_in_fp32_the_configuration_names_the_type(tmp_path, merged, config, expected):
    folder = model_folder(tmp_path / "model", config)
    copy_other_files(folder, merged, Plan({}), "float32")
    assert json.loads((merged / "config.json").read_text()) == expected


def test_untied_embeddings_are_in_the_configuration_and_the_index(tmp_path, merged):
    index = {"metadata": {"total_size": 8, "more": 1}, "weight_map": {"embed": "b.safetensors"}}
    files = ["a.safetensors", "b.safetensors"]
    config = {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": True}
    folder = model_folder(tmp_path / "model", config, *files, index=index)
    copy_other_files(folder, merged, plan_of(embed="b", lm_head="b"), None)
    found = json.loads((merged / "config.json").read_text())
    assert found == {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": False}
    found = json.loads((merged / "model.safetensors.index.json").read_text())
    assert found["metadata"] == {"total_size": 16, "more": 1}
    assert found["weight_map"] == {"embed": "b.safetensors", "lm_head": "b.safetensors"}


@pytest.mark.parametrize(("frozen", "is_refused"), [("fp8", False), ("nf4", True)])
def test_an_adapter_of_rounded_weights_needs_the_flag(make_run, frozen, is_refused):
    run, command = make_run(train={"frozen": frozen}), "lookonce adapter merge RUN DIR"
    check_frozen(run, command, allows_unquantised=True)
    if not is_refused:
        return check_frozen(run, command, allows_unquantised=False)
    with pytest.raises(UsageError, match=rf"quantised to {frozen}.*: {command} --onto-unquantised\n"):
        check_frozen(run, command, allows_unquantised=False)
