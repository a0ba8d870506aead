"""A cache built on a GPU: the same bits in every build, and the stock tower's output up to bfloat16's rounding."""

from __future__ import annotations

import pytest
import torch

from lookonce.cache.store.reader import VisionCache
from lookonce.run.open import TO_BUILD, OpenRun, open_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def build(make_run, root: str, **options: object) -> tuple[OpenRun, VisionCache]:
    inputs = open_run(make_run(cache={"dir": root, "dtype": "bfloat16"} | options), TO_BUILD)
    report = inputs.build()
    assert report.num_encoded == report.num_wanted and not report.quarantined
    return inputs, inputs.open_cache()


def test_two_builds_have_the_same_bits(make_run, tmp_path):
    caches = [build(make_run, str(tmp_path / name))[1] for name in ("one", "two")]
    assert all(torch.equal(caches[0][key], caches[1][key]) for key in caches[0].keys())


@pytest.mark.guarantee("Several images in one tower batch give what each gives alone, to rounding.")
def test_features_are_those_of_each_image_alone(make_run, tmp_path):
    inputs, cache = build(make_run, str(tmp_path / "caches"))
    tower = inputs.load_tower(fast=False)
    for key, path in list(inputs.images.path_of.items())[:16]:
        patches, grid = inputs.processor.read(path)
        alone = tower.encode(patches, [grid]).cpu().double()
        differences = torch.linalg.vector_norm(cache[key].double() - alone, dim=(0, 2))
        assert (differences <= 2e-2 * torch.linalg.vector_norm(alone, dim=(0, 2))).all()  # of each level


def test_fp8_features_equal_bfloat16_features_up_to_rounding(make_run, tmp_path):
    _, whole = build(make_run, str(tmp_path / "caches"))
    _, fp8 = build(make_run, str(tmp_path / "caches"), dtype="fp8_e4m3")
    assert fp8.size_bytes < 0.7 * whole.size_bytes
    for key in whole.keys():
        expected = whole[key].float()
        assert (fp8[key].float() - expected).norm() < 0.04 * expected.norm()
