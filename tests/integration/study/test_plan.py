"""What a study will cost: the counts are those of training."""

from __future__ import annotations

import pytest

from lookonce.run.open import FROM_CACHE, open_run
from lookonce.study.file import expand, read_study
from lookonce.study.plan import measure, plan_study
from lookonce.train.data.sampler import Sampler

STAGE_MAP = "datasets/kvasir-vqa.stages/reasoning.yaml"
CONTEXT = {"data.stage_map": STAGE_MAP, "data.context": {"by": "stage", "order": [1, 2, 3]}}
VARIANTS = {"plain": None, "later": {"starts_from": "plain", "train.steps": 2}, "own": {"train.learning_rate": 0.1}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": {"mode": "separate"}},
        {"batch": {"questions_per_image": 1, "max_tokens": 37}},
        {"data": {"context": {"by": "stage", "order": [1, 2, 3]}, "stage_map": STAGE_MAP}},
    ],
    ids=str,
)
def test_the_counts_are_those_of_the_training_itself(make_cached_run, root, monkeypatch, changes):
    monkeypatch.chdir(root)
    run = make_cached_run(train={"steps": None, "epochs": 1}, **changes)
    session = open_run(run, FROM_CACHE)
    examples, _ = session.examples("train")
    sampler = Sampler.of(examples, session.chat_tokenizer.image_token_id, run.batch, run.train.seed)
    found = measure(run)
    assert (found.num_steps, found.num_samples) == (len(sampler), len(examples))
    assert found.num_tokens == sum(sampler.pack_lengths(0)) and found.num_answers == len(examples)
    assert 0 < len(examples) <= 439 and found.errors == ()


def test_the_questions_of_a_training_by_rewards_are_those_that_leave_room_for_an_answer(make_cached_run):
    run = make_cached_run(train={"objective": "grpo", "steps": None, "epochs": 1}, batch={"max_tokens": 70})
    questions, _, num_too_long = open_run(run, FROM_CACHE).questions("train")
    found = measure(run)
    assert found.num_samples == len(questions) and 0 < num_too_long < 439
    assert (found.num_answers, found.num_tokens, found.errors) == (run.grpo.samples * len(questions), None, ())
    steps = found.num_steps
    twice = measure(run.model_copy(update={"grpo": run.grpo.model_copy(update={"iterations": 2})}))
    assert twice.num_answers == pytest.approx(found.num_answers * -(-steps // 2) / steps, abs=run.grpo.samples)


def test_variants_are_counted_and_timed_by_a_given_rate(write_study, built):
    path = write_study(VARIANTS, {"cache": {"dir": str(built.folder.parent)}}, seeds=[1, 2])
    plan = plan_study(path, given_ms=100)
    plain, later, own = plan.variants
    assert (plain.workload.num_steps, plain.workload.num_answers, later.workload.num_answers) == (4, 32, 16)
    assert plain.workload == own.workload and plain.workload.num_tokens == 2 * later.workload.num_tokens > 0
    assert [round(seconds, 1) for seconds in (plain.seconds, later.seconds, plan.seconds)] == [3.2, 1.6, 16.0]
    assert plan.errors == []
    assert "6 runs, 160 answers" in plan.text() and "; 16.0 s of training on one GPU" in plan.text()


def test_a_trained_variant_gives_the_rate_of_the_others(write_study, built, look_trained):
    path = write_study(VARIANTS, {"cache": {"dir": str(built.folder.parent)}})
    assert plan_study(path).seconds is None
    look_trained(expand(read_study(path))["plain-42"])
    assert [round(variant.seconds, 2) for variant in plan_study(path).variants] == [3.2, 1.6, 3.2]


def test_a_rate_is_scaled_by_the_tokens_of_a_sample(write_study, built):
    variants = {"plain": None, "apart": {"batch.questions_per_image": 1}}
    plain, apart = plan_study(write_study(variants, {"cache": {"dir": str(built.folder.parent)}}), 100).variants
    ratio = apart.workload.num_tokens / plain.workload.num_tokens
    assert ratio > 1.1 and apart.seconds / plain.seconds == pytest.approx(ratio)


def test_a_variant_that_draws_its_answers_is_counted_by_questions_and_has_no_time_but_its_own(
    write_study, built, look_trained
):
    drawing = {"train.objective": "grpo", "grpo.samples": 3, "grpo.max_new_tokens": 12}
    variants = {"plain": None, "drawing": drawing, "long": drawing | {"grpo.max_new_tokens": 100_000}}
    path = write_study(variants, {"cache": {"dir": str(built.folder.parent)}})
    plan = plan_study(path, 100)
    plain, drawn, long = plan.variants
    workload = drawn.workload
    assert (workload.num_steps, workload.num_samples) == (plain.workload.num_steps, plain.workload.num_samples)
    assert (workload.num_answers, workload.num_tokens) == (3 * workload.num_samples, None)
    assert plain.seconds and drawn.seconds is None and plan.seconds is None
    assert plan.errors == ["long: no record can be trained on"] and long.workload.num_steps == 0
    look_trained(expand(read_study(path))["drawing-42"])
    plain, drawn, _ = plan_study(path).variants
    assert drawn.seconds and plain.seconds is None


def test_what_would_stop_a_variant_is_an_error(write_study):
    stages = {"batch.order": {"by": "stage", "stages": [1, 2]}}
    variants = {"a": None, "b": {"lora.targets": ["none"]}, "c": {"batch.max_tokens": 3}, "d": stages}
    plan = plan_study(write_study(variants))
    assert [error.partition(":")[0] for error in plan.errors] == ["b", "c", "d"]
    assert "c: no record can be trained on" in plan.errors


def test_a_route_that_lacks_a_variant_is_an_error(write_study):
    plan = plan_study(write_study({"a": None, "b": {"route": {"variants": {1: "a"}}}}))
    assert plan.errors[0].startswith(
        "variant b: 69 of 69 questions have no run to answer them: no stage (69); there are"
    )


def test_a_plan_counts_what_other_variants_have_not_answered_yet_as_if_it_were_true(
    write_study, built, root, monkeypatch
):
    monkeypatch.chdir(root)
    variants = {
        "own": {"answers_of": ["half-1", "half-2"], **CONTEXT},
        "half-1": {"data.held_out": {"fold": 1, "of": 2}},
        "half-2": {"data.held_out": {"fold": 2, "of": 2}},
        "true": CONTEXT,
    }
    base = {"cache": {"dir": str(built.folder.parent)}, "train": {"steps": None, "epochs": 1}}
    plan = plan_study(write_study(variants, base))
    own, first, second, true = (one.workload for one in plan.variants)
    assert plan.errors == [] and own == true and first.num_answers + second.num_answers == own.num_answers
    assert plan.variants[0].row()[0] == "own (after half-1, half-2)"
