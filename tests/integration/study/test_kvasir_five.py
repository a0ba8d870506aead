"""The study of Kvasir-VQA, on made-up records with its questions: it can be planned, and its variants are matched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lookonce.datasets.curriculum import read_stage_map
from lookonce.datasets.records import Record, Turn, write_records
from lookonce.study.figures import needs_of, sequences
from lookonce.study.file import StudyFile, read_study
from lookonce.study.plan import plan_study

STAGE_MAP = "datasets/kvasir-vqa.stages/reasoning.yaml"
NUM_RECORDS = {1: 192, 2: 155, 3: 153}
"""Records of each stage, in the proportions of the dataset."""


@pytest.fixture
def study_file(root: Path, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The study file in a folder with such records, on the sample's model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").symlink_to(root / "datasets")
    (tmp_path / "experiments").mkdir()
    for name in ("kvasir-five.yaml", "kvasir-vqa.yaml"):
        text = (root / "experiments" / name).read_text().replace("Qwen/Qwen3-VL-8B-Instruct", f"{sample}/model")
        (tmp_path / "experiments" / name).write_text(text.replace("samples_per_step: 128", "samples_per_step: 4"))
    folder = tmp_path / "data" / "kvasir-vqa"
    shutil.copytree(sample / "images", folder / "images")
    records = made_up(sorted((folder / "images").iterdir()))
    for split in ("train", "val", "test"):
        write_records(folder / f"{split}.jsonl", records)
    return Path("experiments/kvasir-five.yaml")


def made_up(images: list[Path]) -> list[Record]:
    stages = {text: one.stage for text, one in read_stage_map(Path(STAGE_MAP)).questions.items()}
    asked = {
        stage: [(image, text) for image in images for text, its in stages.items() if its == stage]
        for stage in NUM_RECORDS
    }
    return [
        Record(images=(image,), turns=(Turn(text, "yes"),), metadata={})
        for stage, number in NUM_RECORDS.items()
        for image, text in asked[stage][:number]
    ]


def needed(variant: str, study: StudyFile) -> set[str]:
    """The variants that a variant consists of, in its sequence or its route."""
    if variant in study.routes:
        return set(study.routes[variant].variants.values())
    before = study.variants[variant].starts_from
    return {variant} | (needed(before, study) if before else set())


@pytest.mark.guarantee("The variants of the study of Kvasir-VQA train on as many answers as the baseline variant.")
def test_the_variants_are_trained_on_as_many_answers_as_the_first(study_file):
    study, plan = read_study(study_file), plan_study(study_file)
    assert plan.errors == []
    answers = {one.variant: one.workload.num_answers for one in plan.variants}
    assert answers["exp1"] == 1500
    found = {variant: sum(answers[one] for one in needed(variant, study)) for variant in study.compared()}
    assert found == {variant: pytest.approx(1500, rel=0.01) for variant in found}
    assert answers["fold-1"] + answers["fold-2"] == 1500 and answers["exp5-inference"] == 0


def test_folds_are_a_cost_of_the_variant_and_a_variant_of_no_epochs_is_no_phase(root, monkeypatch):
    monkeypatch.chdir(root)
    study = read_study(Path("experiments/kvasir-five.yaml"))
    assert needs_of("exp5", study) == ["fold-1", "fold-2", "exp5"]
    assert ["stage-1", "exp4-2", "exp4"] in sequences(study)
    assert not any("exp5-inference" in sequence for sequence in sequences(study))
