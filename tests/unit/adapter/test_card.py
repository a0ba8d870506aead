"""The card says what is known, what is not, and what the licence of the data may mean; uploads name no local folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from lookonce.adapter.card import UNKNOWN, BaseModel, CardFacts, Dataset, card, facts_of, find_base_model, find_dataset
from lookonce.adapter.push import check_files, reduced_run, without_folders
from lookonce.errors import ModelError, UsageError
from lookonce.files import write_json
from lookonce.report.runs import SplitFacts
from lookonce.run.folder import RunFolder
from lookonce.run.sections import ModelSection

SCORES = {
    "overall": {"num_questions": 69, "exact_match": 0.884, "majority": 0.435},
    "headline": {
        "metric": "exact_match",
        "num_questions": 69,
        "score": 0.884,
        "interval": [0.744, 0.977],
        "majority": 0,
    },
    "baselines": {"majority": {"exact_match": 0.435, "score": 0.435, "difference": 0.449, "interval": [0.256, 0.657]}},
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


def test_splits_of_different_metrics_have_them_beside_their_names(facts):
    by_points = {"headline": SCORES["headline"] | {"metric": "point_inside"}}
    made = text(replace(facts, scores={"test": SCORES, "val": by_points}))
    assert "| split |  | questions | score | interval |" in made
    assert "| test (exact match) | this model |" in made and "| val (points inside the box) | this model |" in made


def test_a_run_without_scores_says_that_nothing_is_known(facts):
    made = text(replace(facts, scores={}))
    assert "This run has no scores" in made and "Nothing is known of the quality" in made
    assert ModelCard(made).data.eval_results is None and "| test |" not in made
    assert ModelCard(made).data.license is None and ModelCard(text(facts, licence="mit")).data.license == "mit"


def test_too_few_images_have_no_interval(facts):
    few = SCORES | {"headline": SCORES["headline"] | {"interval": None}}
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


@pytest.mark.parametrize("systems", [["a", "of the run"], None])
def test_where_records_differ_the_prompt_has_the_system_text_of_the_run_file(facts, systems):
    data = facts.run.data.model_copy(update={"system": "of the run"})
    made = text(replace(facts, systems=systems, run=facts.run.model_copy(update={"data": data})))
    assert """"role": "system", "content": [{"type": "text", "text": 'of the run'}]""" in made


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


COMMIT = "a1" * 20


def test_a_name_in_the_run_file_is_taken_with_its_commit_and_a_branch_is_the_commit_that_is_here(monkeypatch, tmp_path):
    def absent(*_, **__):
        raise ModelError("not here")

    monkeypatch.setattr("lookonce.adapter.card.find_model", absent)
    base = find_base_model(ModelSection(path="owner/name", revision=COMMIT))
    assert (base.name, base.commit, base.licence) == ("owner/name", COMMIT, None)
    assert find_base_model(ModelSection(path="owner/name", revision="main")).commit is None
    folder = tmp_path / COMMIT
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    monkeypatch.setattr("lookonce.adapter.card.find_model", lambda *_, **__: folder)
    base = find_base_model(ModelSection(path="owner/name", revision="main"))
    assert (base.commit, base.licence) == (COMMIT, "apache-2.0")


def test_the_folder_of_a_download_has_the_name_and_the_commit(tmp_path):
    folder = tmp_path / "hub" / "models--Qwen--Qwen3-VL-2B" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    base = find_base_model(ModelSection(path=str(folder)))
    assert (base.name, base.commit) == ("Qwen/Qwen3-VL-2B", COMMIT)


def test_any_other_folder_needs_a_name(tmp_path):
    model = ModelSection(path=str(tmp_path))
    with pytest.raises(UsageError, match=r"its name on the Hub is not known; name it: --base-model OWNER/NAME"):
        find_base_model(model)
    assert find_base_model(model, "owner/name").name == "owner/name"
    assert find_base_model(model, f"owner/name@{COMMIT}").commit == COMMIT
    with pytest.raises(UsageError, match="neither a folder any more nor a name on the Hub"):
        find_base_model(ModelSection(path=str(Path("/none/of/these"))))


@pytest.mark.parametrize("given", ["name", "/a/b", "owner/name@main", "a/b/c", ""])
def test_a_malformed_name_is_refused(given, tmp_path):
    with pytest.raises(UsageError, match="is not a model on the Hub; write OWNER/NAME"):
        find_base_model(ModelSection(path=str(tmp_path)), given)


@pytest.mark.parametrize(
    ("recorded", "named"), [("a1" * 20 + "-dirty", True), ("[x](y)" + "a" * 40, False), (None, False)]
)
def test_a_commit_is_taken_from_the_record_if_it_is_one(make_run, recorded, named):
    run = make_run()
    RunFolder(run.output).claim(run, {})
    write_json(run.output / "environment.json", {"libraries": {}, "commit": recorded})
    assert facts_of(RunFolder(run.output), BaseModel("owner/base", None, None)).commit == (recorded if named else None)


def test_keys_of_an_evaluation_that_may_have_texts_of_records_are_left_out(make_run):
    folder = RunFolder(make_run().output)
    folder.claim(make_run(), {})
    score = {"num_questions": 1, "exact_match": 1.0, "majority": 0.0}
    texts = {"by_question": {"Is it me?": score}, "by_source": {"me": score}, "of_another_version": {"Is it me?": 1}}
    write_json(folder.metrics("val"), {"overall": score, "by_stage": {}, **texts})
    [shared] = facts_of(folder, BaseModel("owner/base", None, None)).scores.values()
    assert shared.pop("headline")["score"] == 1.0 and shared == {"overall": score, "by_stage": {}}


# What is uploaded names no folder of this machine.

BASE = BaseModel("owner/base", "a" * 40, None)
NAMES = st.text("abcXYZ019-_.", min_size=1, max_size=8).filter(lambda name: name.strip("."))


def test_each_path_of_a_run_file_becomes_its_last_part(make_run):
    run = make_run(
        data={"train": ["/home/me/a.jsonl", "sets/b.jsonl"], "image_root": "/data/of/me", "stage_map": "/x/map.yaml"},
        cache={"dir": "~/caches", "stage": "/scratch/me"},
        train={"start_from": "/home/me/runs/first"},
        output="/home/me/runs/second",
    )
    reduced = reduced_run(run, BASE)
    assert [str(path) for path in reduced.data.train] == ["a.jsonl", "b.jsonl"]
    assert (str(reduced.data.image_root), str(reduced.cache.dir), str(reduced.output)) == ("me", "caches", "second")
    assert (str(reduced.train.start_from), str(reduced.data.stage_map)) == ("first", "map.yaml")
    assert (reduced.model.path, reduced.model.revision) == (BASE.name, BASE.commit)
    assert "/" not in reduced.to_yaml().replace(BASE.name, "")
    start = f"hf://owner/adapter@{'b' * 40}"
    assert reduced_run(make_run(train={"start_from": start}), BASE).train.start_from == start


@given(st.lists(NAMES, min_size=2, max_size=5), st.sampled_from(["/", "~/"]))
def test_a_text_that_is_an_absolute_path_becomes_its_last_part(parts, root):
    path = root + "/".join(parts)
    assert without_folders({"a": [path, {"b": path}]}) == {"a": [parts[-1], {"b": parts[-1]}]}


@pytest.mark.parametrize("text", ["owner/name", "a/b.json", "{% if a %}/{% endif %}", "", "/", "<image>\n/x", "1/2"])
def test_other_texts_stay(text):
    assert without_folders([text, 3, None]) == [text, 3, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("made in /me/secret", "card names a folder of this machine, /me;"),
        ('"/srv/runs/me"', "card names a folder of this machine, /srv/runs/me;"),
        ("with hf_" + "a1" * 20, "card has an access token of the Hub"),
    ],
)
def test_a_file_with_a_folder_or_a_token_is_refused(text, message, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/me"))
    check_files({"card": "owner/name and /srv/runs/mega, hf_hub"}, [Path("/srv/runs/me"), Path("/")])
    with pytest.raises(UsageError, match=message):
        check_files({"card": text}, [Path("/srv/runs/me")])
