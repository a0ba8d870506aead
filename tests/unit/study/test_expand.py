"""A study becomes ordinary run files."""

from __future__ import annotations

import pytest

from lookonce.errors import UsageError
from lookonce.run.config import read_run_file
from lookonce.study.file import expand, read_study, write_run_files

VARIANTS = {
    "later": {"starts_from": "plain", "train.steps": 2},
    "plain": None,
    "classic": {"batch.questions_per_image": 1},
}


def test_every_variant_and_seed_is_a_run_with_a_folder_of_its_own(write_study, tmp_path):
    runs = expand(read_study(write_study(VARIANTS, seeds=[3, 4], evaluate="test")))
    assert list(runs) == ["later-3", "plain-3", "classic-3", "later-4", "plain-4", "classic-4"]
    later, plain = runs["later-4"].settings, runs["plain-4"].settings
    assert (later.train.seed, later.train.steps, later.eval.split) == (4, 2, "test")
    assert later.train.start_from == plain.output == tmp_path / "study" / "plain-4"
    assert plain.train.start_from is None and runs["classic-4"].settings.batch.questions_per_image == 1


def test_a_run_file_is_the_run(write_study, tmp_path):
    runs = expand(read_study(write_study(VARIANTS)))
    write_run_files(list(runs.values()), tmp_path / "study.yaml")
    assert {name: read_run_file(one.run_file) for name, one in runs.items()} == {k: v.settings for k, v in runs.items()}


def test_all_study_files_of_the_project_are_valid(root, monkeypatch):
    monkeypatch.chdir(root)
    paths = [path for path in (root / "experiments").glob("*.yaml") if "\nvariants:" in path.read_text()]
    assert paths and all(expand(read_study(path)) for path in paths)


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        ({"a": {"train.epoch": 1}, "b": {"lora.rank": 0}}, "(?s)a: .*did you mean `epochs`.*variant b: .*lora.rank"),
        ({"a": None, "b": {"starts_from": "a", "lora.rank": 8}}, r"b: .* shape \(lora.rank: 8, there 4\); give both"),
    ],
)
def test_mistakes_of_all_variants_are_named_at_once(write_study, variants, said):
    with pytest.raises(UsageError, match=said) as found:
        expand(read_study(write_study(variants, seeds=[1, 2])))
    assert str(found.value).count("variant b") <= 1


def test_values_keep_their_types(write_study):
    changes = {"train.learning_rate": 1e-5, "lora.targets": ["q_proj"], "data.val": None, "train.scheduler": "constant"}
    run = expand(read_study(write_study({"a": changes})))["a-42"].settings
    assert (run.train.learning_rate, run.lora.targets, run.data.val) == (1e-5, ["q_proj"], [])
