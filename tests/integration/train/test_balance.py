"""`batch.balance`: a step's loss is that of the stock model with the weights of torch's cross-entropy."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.batches import BatchMaker
from support.trainings import CPU, SIZES, assert_same, gradients, step, stock_logits_and_labels

from lookonce.datasets.records import read_records, write_records
from lookonce.run.open import FROM_CACHE, TO_BUILD, open_run
from lookonce.run.sections import BatchSection
from lookonce.train.data.batches import IGNORED
from lookonce.train.data.sampler import Sampler
from lookonce.train.model.load import load_with_tower

QUESTIONS = {"How many polyps are in the image?": 7, "Is there text?": 5, "What type of polyp is present?": 6}


@pytest.fixture(scope="module")
def session(sample, make_run_in, tmp_path_factory):
    """Some records of three questions, with answers of several lengths that are not equally frequent."""
    folder, left, chosen = tmp_path_factory.mktemp("balance"), Counter(QUESTIONS), []
    for record in read_records(sample / "train.jsonl"):
        if left[record.turns[0].question] > 0:
            left[record.turns[0].question] -= 1
            chosen.append(record)
    write_records(folder / "train.jsonl", chosen, image_root=sample)
    data = {split: str(folder / "train.jsonl") for split in ("train", "val")} | {"test": [], "image_root": str(sample)}
    run = make_run_in(
        folder, data=data, cache=SIZES, batch={"balance": "answer"}, lora={"modules_to_save": ["embed_tokens"]}
    )
    open_run(run, TO_BUILD).build()
    return open_run(run, FROM_CACHE)


@pytest.mark.guarantee(
    "With `batch.balance`, a step has the loss and gradients of the stock model with a weight for each record: the sum "
    "of weight times loss, divided by the sum of the weights, however it is packed or spread over ranks."
)
@pytest.mark.parametrize("loss", ["token", "sample"])
def test_a_step_is_the_weighted_mean_of_the_stock_models_losses(session, sample, stock_processor, random_lora, loss):
    stock = random_lora(session, load_with_tower)
    logits, labels = stock_logits_and_labels(stock, stock_processor(sample / "model"), session)
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    asked = [record.turns[0] for record in session.records["train"]]
    answers = {question: Counter(turn.answer for turn in asked if turn.question == question) for question in QUESTIONS}
    counts = [(QUESTIONS[turn.question], answers[turn.question], turn.answer) for turn in asked]
    weights = [number / len(answers) / answers[answer] for number, answers, answer in counts]
    weight, num_targets = torch.tensor(weights), (labels != IGNORED).sum(1)
    assert len({*weights}) > 3 and len({*num_targets.tolist()}) > 1
    if loss == "sample":
        expected = (weight * each.sum(1) / num_targets).sum() / weight.sum()
    else:
        expected = (weight * each.sum(1)).sum() / (weight * num_targets).sum()
    expected.backward()
    ours, (examples, _) = random_lora(session), session.examples("train")
    for mode in ("shared", "packed", "separate"):
        for num_ranks in (1, 2):
            batch = BatchSection(mode=mode, samples_per_step=1000, tokens_per_pack=600, balance="answer", loss=loss)
            batches = []
            for rank in range(num_ranks):
                chat, ranks = session.chat_tokenizer, {"rank": rank, "num_ranks": num_ranks}
                sampler = Sampler.of(examples, chat.image_token_id, batch, 3, **ranks)
                [micro_batches] = sampler.epoch(0)
                batches += map(BatchMaker(sampler, chat, session.features, CPU, pads=False).batch, micro_batches)
            assert_same(step(ours, batches), (expected.item(), gradients(stock)))


def test_the_validation_loss_has_no_weights_and_those_of_training_are_of_the_records_that_are_kept(session):
    assert {example.weight for example in session.examples("val")[0]} == {1.0}
    examples, _ = session.examples("train")
    assert sum(example.weight for example in examples) == pytest.approx(len(examples))
    longest = sorted(example.num_tokens for example in examples)[-4]
    fewer = session.run.batch.model_copy(update={"max_tokens": longest})
    kept, left_out = session.changed(run=session.run.model_copy(update={"batch": fewer})).examples("train")
    assert left_out and sum(example.weight for example in kept) == pytest.approx(len(kept))
