"""Which runs of a study a build of the cache serves."""

from __future__ import annotations

import pytest

from lookonce.datasets.records import Record, Turn, write_records
from lookonce.run.records import read_splits
from lookonce.study.file import expand, read_study
from lookonce.study.run import find_builders, read_contents


@pytest.fixture
def builders_of(write_study, tmp_path):
    """The name of the run that builds for each run of a study; its records have stages, and images of their own."""

    def find(variants, **values) -> dict[str, str]:
        for split, number in (("train", 40), ("val", 2)):
            records = [
                Record(images=(tmp_path / f"{split}-{n}.png",), turns=(Turn("q", "yes"),), metadata={"stage": n % 4})
                for n in range(number)
            ]
            write_records(tmp_path / f"{split}.jsonl", records)
        data = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "val")} | {"test": []}
        runs = expand(read_study(write_study(variants, {"data": data}, **values)))
        contents = read_contents(runs.values())
        for one in runs.values():
            records = read_splits(one.settings)
            assert contents[one.name].num_train == len(records["train"])
            assert contents[one.name].images == {record.images[0] for some in records.values() for record in some}
        return {name: one.name for name, one in find_builders(runs.values(), contents).items()}

    return find


def test_the_variant_that_selects_least_builds_for_all_that_have_its_features(builders_of):
    variants = {
        "some": {"data.where": {"stage": 1}},
        "replayed": {"data.where": {"stage": 1}, "data.replay": {"stage": 2, "share": 0.5}},
        "all": {
            "batch.order": {"by": "stage", "stages": [0, 1, 2, 3]},
            "data.context": {"by": "stage", "order": [0, 1]},
        },
        "attention": {"model.attention": "eager", "cache.shard_mb": 2},
        "small": {"data.where": {"stage": 2}, "cache.max_pixels": 65536},
        "elsewhere": {"cache.dir": "elsewhere"},
    }
    alone = ("small-1", "elsewhere-1")
    assert builders_of(variants, seeds=[1]) == {
        name: name if name in alone else "all-1" for name in ("some-1", "replayed-1", "all-1", "attention-1", *alone)
    }


def test_variants_with_images_of_their_own_and_seeds_that_draw_others_have_builds_of_their_own(builders_of):
    variants = {
        "one": {"data.where": {"stage": 1}},
        "two": {"data.where": {"stage": [1, 2]}},
        "three": {"data.where": {"stage": 3}},
    }
    assert builders_of(variants, seeds=[1]) == {"one-1": "two-1", "two-1": "two-1", "three-1": "three-1"}
    shares = {"less": {"data.where": {"share": 0.2}}, "more": {"data.where": {"share": 0.5}}}
    found = builders_of(shares, seeds=[1, 2])
    assert found == {"less-1": "more-1", "more-1": "more-1", "less-2": "more-2", "more-2": "more-2"}
