"""The card says what is known, what is not, and what the licence of the data may mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from lookonce.adapter.card import UNKNOWN, BaseModel, CardFacts, Dataset, card, find_dataset
from lookonce.report.runs import SplitFacts

SCORES = {
    "overall": {"num_questions": 69, "exact_match": 0.884, "majority": 0.435},
    "exact_match_interval": [0.744, 0.977],
    "baselines": {"majority": {"exact_match": 0.435, "difference": 0.449, "interval": [0.256, 0.657]}},
    "metrics": {"chrf": {"name": "chrF", "num_questions": 69, "model": 0.827, "majority": 0.26}},
}
NC = Dataset("Kvasir-VQA", "SimulaMet-HOST/Kvasir-VQA", "c" * 40, "CC BY-NC 4.0", "https://example.org/kvasir")
NO_DATASET = Dataset(UNKNOWN, None, None, UNKNOWN, "")


@pytest.fixture
def facts(make_run) -> CardFacts:
    return CardFacts(
        run=make_run(),
        base=BaseModel("owner/base", "b" * 40, "apache-2.0"),
        dataset=NC,
        scores={"test": SCORES},
        splits={"train": SplitFacts(10, 439, 44)},
        systems=[],
        trained={"num_steps": 120, "seconds": 3600, "first_step": 0},
        libraries={"torch": "2.13.0"},
        commit=None,
        gpus=["H200", "H200"],
        gpu_hours=2.125,
    )


def text(facts: CardFacts, **options) -> str:
    return card(facts, "owner/adapter", **{"is_merged": False} | options)


def test_scores_are_beside_their_intervals_and_baselines(facts):
    made = text(facts)
    assert "| test | this model | 69 | 88.4% | 74.4 to 97.7 |  |" in made
    assert "| test | majority |  | 43.5% |  | +44.9 (25.6 to 65.7) |" in made
    assert "| test | chrF | 69 | 0.827 | 0.260 |" in made
    mine, majority = ModelCard(made).data.eval_results
    assert (mine.metric_value, mine.dataset_type, mine.dataset_revision) == (0.884, NC.hub_id, NC.revision)
    assert majority.metric_name == "exact match of the baseline: majority" and majority.metric_value == 0.435


def test_a_run_without_scores_says_that_nothing_is_known(facts):
    made = text(replace(facts, scores={}))
    assert "This run has no scores" in made and "Nothing is known of the quality" in made
    assert ModelCard(made).data.eval_results is None and "| test |" not in made


def test_too_few_images_have_no_interval(facts):
    few = SCORES | {"exact_match_interval": None}
    assert "88.4% | none |" in text(replace(facts, scores={"test": few}))
    assert "A score without an interval is of fewer than 5 images." in text(replace(facts, scores={"test": few}))


def test_the_licence_of_the_data_and_what_it_may_mean_are_said(facts):
    made = text(facts)
    assert "Licence: CC BY-NC 4.0" in made and "may bind a model" in made and "no commercial use" in made
    free = text(replace(facts, dataset=replace(NC, licence="CC BY 4.0")))
    assert "may bind a model" in free and "no commercial use" not in free
    unknown = text(replace(facts, dataset=NO_DATASET))
    assert "The licence of the dataset is not known. Check it" in unknown
    assert ModelCard(unknown).data.datasets is None and "images of" not in unknown


def test_the_weights_have_a_licence_only_if_the_user_gives_one(facts):
    assert ModelCard(text(facts)).data.license is None
    assert ModelCard(text(facts, licence="cc-by-nc-4.0")).data.license == "cc-by-nc-4.0"


def test_how_it_was_made_leaves_out_what_is_not_recorded(facts):
    made = text(facts)
    assert "2.12 GPU hours for training and answering on 2 x H200" in made and f"commit {'b' * 40}" in made
    assert "test: " not in made and "train: 439 questions about 44 images" in made
    other = text(replace(facts, gpus=[], gpu_hours=None, base=BaseModel("owner/base", None, None), libraries={}))
    assert "GPU hours" not in other and "without a GPU" in other and "Versions" not in other
    assert "at a commit that is not recorded" in other and "Base model: unknown, see its card" in other


@pytest.mark.parametrize(
    ("systems", "said"),
    [
        (["Answer briefly."], '"role": "system", "content": [{"type": "text", "text": \'Answer briefly.\'}]'),
        (["a", "b"], "2 different system texts"),
        (None, "their system text is not known"),
    ],
)
def test_the_prompt_has_the_system_text_of_the_training(facts, systems, said):
    assert said in text(replace(facts, systems=systems))


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("systems", [[], ["one 'quoted' text\nof two lines"]])
def test_the_code_is_python(facts, is_merged, systems):
    made = text(replace(facts, systems=systems), is_merged=is_merged, revision="v1")
    code = made.partition("```python\n")[2].partition("```")[0]
    compile(code, "card", "exec")
    assert ("PeftModel" in code) != is_merged and 'revision="v1"' in code
    assert ("owner/base" in code) != is_merged


def test_the_dataset_is_that_of_the_preparation_or_a_known_one():
    prepared = {
        "title": "Mine",
        "licence": "CC0",
        "homepage": "https://example.org",
        "source": {"place": "/home/me/kvasir", "revision": "d" * 40},
        "settings": {"definition": {"hub": {"id": "owner/mine"}}},
    }
    assert find_dataset(None, prepared) == Dataset("Mine", "owner/mine", "d" * 40, "CC0", "https://example.org")
    assert find_dataset(None, {}) == NO_DATASET
    known = find_dataset("kvasir-vqa", prepared)
    assert (known.hub_id, known.licence) == ("SimulaMet-HOST/Kvasir-VQA", "CC BY-NC 4.0")


def test_the_commit_of_lookonce_is_named_if_it_is_known(facts):
    assert f"Trained with lookonce at the git commit {'d' * 40}\n" in text(replace(facts, commit="d" * 40))
    dirty = text(replace(facts, commit=f"{'d' * 40}-dirty"))
    assert f"git commit {'d' * 40}, with changes that were not committed\n" in dirty
    assert "git commit" not in text(facts)
