"""Scores, the majority baseline, and images shuffled to see whether the model looks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Record, Turn
from lookonce.errors import UsageError
from lookonce.eval.answers.generate import greedy_answers, shuffle_images
from lookonce.eval.scores.metrics import Evaluation, Majority, Prediction
from lookonce.train.data.collate_rows import Collator
from lookonce.train.data.features import CachedFeatures
from lookonce.train.data.tokenize import Prompter
from lookonce.train.model.load import load_without_tower


def prediction(answer: str, predicted: str, majority: str = "no", question: str = "q") -> Prediction:
    return Prediction("here:1", ("a.jpg",), question, answer, predicted, majority)


@pytest.mark.parametrize(
    ("answer", "predicted", "right"),
    [
        ("none", "none", True),
        ("none", " none\n", True),
        ("none", "no", False),
        ("no", "none", False),
        ("yes", "Yes", False),
        ("11-20mm", "11-20mm.", False),
        ("yes", "", False),
    ],
)
def test_exact_match_is_strict_but_for_outer_spaces(answer, predicted, right):
    assert prediction(answer, predicted).is_right is right


@pytest.mark.parametrize(
    ("predicted", "right"), [("paris ip", True), (" paris is ", True), ("paris", False), ("paris ip; paris is", False)]
)
def test_any_of_several_references_is_right_and_nothing_between_them(predicted, right):
    one = Prediction("here:1", "a.jpg", "q", "paris ip", predicted, predicted, ("paris ip", "paris is"))
    assert (one.is_right, one.is_majority_right) == (right, right)
    assert one.to_json()["references"] == ("paris ip", "paris is")
    assert "references" not in prediction("paris ip", predicted).to_json()


@pytest.mark.parametrize(
    ("metadata", "turns", "found"),
    [
        ({"references": ["a", "b"]}, [Turn("q", "a")], ("a", "b")),
        ({}, [Turn("q", "a")], ()),
        ({"references": ["b", "a"]}, [Turn("q", "a")], ()),
        ({"references": ["a", 1]}, [Turn("q", "a")], ()),
        ({"references": "a"}, [Turn("q", "a")], ()),
        ({"references": []}, [Turn("q", "a")], ()),
        ({"references": ["a", "b"]}, [Turn("q", "a"), Turn("r", "a")], ()),
    ],
)
def test_references_are_those_that_begin_with_a_records_only_answer(metadata, turns, found):
    assert Record((), tuple(turns), metadata=metadata).references == found


def test_scores_are_shares_in_all_and_by_question():
    evaluation = Evaluation.of(
        [
            prediction("yes", "yes"),
            prediction("no", "yes"),
            prediction("2", "2", "1", "how many"),
            prediction("no", "no"),
        ]
    )
    assert evaluation.overall.num_questions == 4
    assert evaluation.overall.exact_match == 3 / 4
    assert evaluation.overall.majority == 2 / 4
    assert evaluation.by_question["q"].exact_match == 2 / 3
    assert evaluation.by_question["how many"].majority == 0
    assert evaluation.to_json()["by_question"]["q"]["num_questions"] == 3


def test_the_majority_is_the_most_frequent_training_answer_of_each_question():
    def record(question, answer):
        return Record((), (Turn(question, answer),))

    answers = [("a", "1"), ("a", "2"), ("a", "2"), ("b", "3"), ("b", "3"), ("b", "3"), ("b", "1")]
    majority = Majority([record(*pair) for pair in answers])
    assert majority.answer("a") == "2"
    assert majority.answer("b") == "3"
    assert majority.answer("never asked") == "3"


def index(num_images: int) -> ImageIndex:
    """Two files an image: two names for the same bytes."""
    key_of = {Path(f"{number}{suffix}.jpg"): str(number) for number in range(num_images) for suffix in ("", "-copy")}
    return ImageIndex(key_of, {key: path for path, key in key_of.items()})


@pytest.mark.parametrize("num_images", [2, 3, 10])
def test_shuffled_images_are_all_others_by_content(num_images):
    images = index(num_images)
    records = [Record((path,), (Turn("q", str(path)),), origin=str(path)) for path in images.key_of]
    shuffled = shuffle_images(records, images)
    pairs = list(zip(records, shuffled, strict=True))
    assert all(images.key_of[a.images[0]] != images.key_of[b.images[0]] for a, b in pairs)
    assert {images.key_of[r.images[0]] for r in shuffled} == set(images.path_of)
    assert all((a.turns, a.origin) == (b.turns, b.origin) for a, b in pairs)


def test_one_image_can_not_be_shuffled():
    images = index(1)
    with pytest.raises(UsageError, match="at least two distinct images, and these records show 1"):
        shuffle_images([Record((path,), (Turn("q", "a"),)) for path in images.key_of], images)


def test_greedy_is_greedy_whatever_the_checkpoint_asks_for(built, sample, make_run, tmp_path):
    shutil.copytree(sample / "model", tmp_path / "model")
    settings = {"repetition_penalty": 50.0, "do_sample": True, "temperature": 9.0, "no_repeat_ngram_size": 1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    answers = []
    for folder in (sample / "model", tmp_path / "model"):
        model_folder = ModelFolder.open(str(folder))
        prompter = Prompter(folder, model_folder.config)
        key = min(built.keys())
        record = Record((Path("a"),), (Turn("Is there text?", "yes"),))
        question = prompter.question(record, 0, [key], [built.grid_thw(key)])
        collator = Collator(CachedFeatures(built), prompter.image_token_id, prompter.tokenizer.pad_token_id)
        model = load_without_tower(model_folder, torch.float32)
        answers.append(greedy_answers(model, prompter.tokenizer, collator, [question], 12, 1, "fp32"))
    assert answers[0] == answers[1] and answers[0][0]


def test_the_report_has_a_line_a_question_and_one_for_all():
    lines = Evaluation.of([prediction("yes", "yes"), prediction("2", "1", "2", "how many")]).text().splitlines()
    assert len(lines) == 4
    assert lines[-1].split() == ["all", "2", "50.0%", "50.0%"]
