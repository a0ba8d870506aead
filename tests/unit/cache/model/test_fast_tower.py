"""The fast tower computes what the stock one does, for a batch of images of different sizes."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.tower import FastTower, Tower, attend_by_size, compiled

GRIDS = [(1, 4, 6), (1, 4, 6), (1, 8, 4), (1, 2, 2), (1, 4, 8)]


@pytest.fixture(scope="module")
def model_folder(sample) -> ModelFolder:
    return ModelFolder.open(str(sample / "model"))


def patches_of(grids: list[tuple[int, int, int]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sum(t * h * w for t, h, w in grids), 1536, generator=generator)


def one_by_one(tower: Tower, patches: torch.Tensor) -> torch.Tensor:
    pieces = torch.split(patches, [t * h * w for t, h, w in GRIDS])
    return torch.cat([tower.encode(piece, [grid]) for piece, grid in zip(pieces, GRIDS, strict=True)])


@pytest.mark.guarantee("Several images in one tower batch give what each gives alone, to rounding.")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_tower_batch_gives_the_features_of_each_image_alone(model_folder, dtype, tolerance):
    patches = patches_of(GRIDS)
    expected = one_by_one(Tower(model_folder, dtype), patches).float()
    fast = Tower(model_folder, dtype, fast=True)
    assert isinstance(fast._run, FastTower)
    found = fast.encode(patches, GRIDS).float()
    assert found.shape == (sum(t * h * w for t, h, w in GRIDS) // 4, 4, 64)
    assert (found - expected).norm() < tolerance * expected.norm()


def test_the_fast_tower_has_the_weights_of_the_stock_one_which_a_cpu_runs_with_one_image_a_batch(model_folder):
    fast, stock = (Tower(model_folder, torch.float32, fast=fast).module.state_dict() for fast in (True, False))
    assert fast.keys() == stock.keys()
    assert all(torch.equal(fast[name], stock[name]) for name in stock)
    by_default = Tower(model_folder, torch.float32)  # on a CPU
    assert not isinstance(by_default._run, FastTower) and by_default.tokens_per_tower_batch == 1


def test_why_the_rotary_embedding_is_not_compiled_is_reported_once(monkeypatch, capsys):
    def refuse(*args, **options):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(torch, "compile", refuse)
    for _ in range(2):
        rotary = compiled(apply_rotary_pos_emb_vision, torch.device("cpu"), torch.float32)
        assert rotary is apply_rotary_pos_emb_vision
    assert capsys.readouterr().err == (
        "compiling the tower's rotary embedding failed (RuntimeError: Failed to find C compiler.); images are encoded "
        "1.3 to 1.4 times slower\n"
    )


def test_attention_stays_within_an_image():
    lengths = [3, 3, 5]
    query, key, value = torch.randn(3, sum(lengths), 2, 8)
    whole = attend_by_size(query, key, value, lengths)
    other = value.clone()
    other[3:] = 0
    assert torch.equal(attend_by_size(query, key, other, lengths)[:3], whole[:3])
    assert not torch.equal(attend_by_size(query, key, other, lengths)[3:], whole[3:])


@pytest.mark.guarantee("Several images in one tower batch give what each gives alone, to rounding.")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-3)])
def test_on_a_gpu_a_tower_batch_gives_the_features_of_each_image_alone(model_folder, dtype, tolerance):
    patches = patches_of(GRIDS).cuda()
    expected = one_by_one(Tower(model_folder, torch.float32, "cuda", fast=False), patches)
    fast = Tower(model_folder, dtype, "cuda")
    assert isinstance(fast._run, FastTower)
    assert fast._run.varlen == (dtype == torch.bfloat16)
    found = fast.encode(patches, GRIDS).float()
    assert (found - expected).norm() < tolerance * expected.norm()
