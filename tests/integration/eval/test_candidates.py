"""The likeliest of known answers: as likely as in conversations of their own, and beside the greedy answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.answers import interrupt_after

from lookonce.datasets.images import image_size
from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.datasets.sample.model import write_model
from lookonce.errors import RunFolderError
from lookonce.eval.answers.candidates.choice import Choice
from lookonce.eval.answers.candidates.conversations import CandidateConversations
from lookonce.eval.answers.candidates.likelihood import Likelihood
from lookonce.eval.answers.dialogues import turns_before
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding.answer import Answer
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.counts import training_answers
from lookonce.eval.scores.prediction import read_predictions
from lookonce.families.qwen3_5 import QWEN3_5
from lookonce.families.qwen3_vl import QWEN3_VL
from lookonce.run.config import RunFile
from lookonce.run.inputs import RunInputs
from lookonce.train.data.collate_rows import RowCollator
from lookonce.train.data.features import Pixels
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.session import Session
from lookonce.train.model.load import load_with_tower, load_without_tower
from lookonce.workflow.train import train

QUIET = {"notify": lambda note: None}
TOLERANCE = 1e-5
ANSWERS = ("no", "yes", "yes, large", "A long answer; with several parts", "1")


def records_of(sample: Path) -> list[Record]:
    """Images of several sizes with 1 to 4 questions, two images, several turns, a system text, and no image."""
    by_size = {image_size(record.images[0].read_bytes()): record for record in read_records(sample / "train.jsonl")}
    first, second, third, *_ = by_size.values()
    about = [(first, 4), (second, 1), (third, 2)]
    asked = [Record(one.images, (Turn(f"Is it number {n}?", "yes"),)) for one, num in about for n in range(num)]
    turns = (*first.turns, *second.turns, Turn("And now?", "no"))
    several = [Record((*third.images, *first.images), turns, system="Answer briefly."), Record(second.images, turns)]
    return [*asked, *several, Record((), (Turn("Is there text?", "no"),))]


@torch.inference_mode()
def stock_logprob(model: Any, collator: RowCollator, example: Example) -> float:
    """The log-probability of the last answer of a conversation, on the stock model with its tower."""
    batch = collator([example])
    inputs = {name: value for name, value in batch.items() if name not in ("targets", "weights", "logits_to_keep")}
    logprobs = model(**inputs).logits[0].double().log_softmax(-1)
    token_ids, supervised = example.expanded(collator.image_token_id)
    end = np.flatnonzero(supervised)[-1]
    start = np.flatnonzero(~supervised[:end])[-1] + 1
    return sum(float(logprobs[place - 1, token_ids[place]]) for place in range(start, end + 1))


def greedy_answer(chat, ended: bool) -> Answer:
    token_ids = chat.tokenizer("no, none", add_special_tokens=False)["input_ids"]
    return Answer.of([*token_ids, *[chat.tokenizer.eos_token_id] * ended], [0.0] * 99, chat.tokenizer)


@pytest.mark.parametrize(("turns", "family"), [("true", QWEN3_VL), ("own", QWEN3_VL), ("own", QWEN3_5)])
def test_candidates_are_as_likely_as_in_conversations_of_their_own(
    sample, make_run_in, random_lora, tmp_path, monkeypatch, turns, family
):
    """On the stock model with its tower; also when the candidates of an image are in several packs and batches.

    A later question follows the greedy answers, which stand in for those of the record with `own`.
    """
    write_model(tmp_path / "model", family=family)
    records = records_of(sample)
    write_records(tmp_path / "asked.jsonl", records, image_root=sample)
    (tmp_path / "known.json").write_text(json.dumps({turn.question: ANSWERS for one in records for turn in one.turns}))
    data = {"train": str(tmp_path / "asked.jsonl"), "val": [], "test": [], "image_root": str(sample)}
    cache, known = {"min_pixels": 1, "max_pixels": 120_000}, {"candidates": str(tmp_path / "known.json")}
    options = {"model": {"path": str(tmp_path / "model")}, "eval": known | {"turns": turns}}
    inputs = RunInputs.open(make_run_in(tmp_path, data=data, cache=cache, **options))
    inputs.build()
    session = Session.open(inputs)
    stock, model = (random_lora(inputs, load).eval() for load in (load_with_tower, load_without_tower))
    chat, pixels = session.chat_tokenizer, Pixels(inputs.processor, inputs.images.path_of)
    collator = RowCollator(pixels, chat.image_token_id, 0)
    questions = Questions.of(session, "train")

    monkeypatch.setattr("lookonce.eval.answers.candidates.choice.CANDIDATES_OF_BATCH", 20)
    greedy = {number: greedy_answer(chat, number % 2 == 0) for number in range(len(questions.asked))}
    choice = replace(Choice.of(questions), answers=greedy)
    earlier = turns_before(questions.asked, questions.dialogues.numbers, greedy, chat.special_token_ids)
    wanted = [(number, text) for number in range(len(questions.asked)) for text in ANSWERS]
    expected = {}
    for number, text in wanted:
        (record, turn), prompt = questions.asked[number], questions.examples[number]
        own = replace(record, turns=(*earlier[number], Turn(record.turns[turn].question, text)))
        example = chat.example(own, prompt.image_keys, [pixels.grid_thw(key) for key in prompt.image_keys])
        expected[number, text] = stock_logprob(stock, collator, example)
    assert len({answer for answer in expected.values()}) == len(wanted)

    examples = CandidateConversations(questions, greedy).examples(wanted)
    for tokens_per_pack in (300, 100_000):
        likelihood = Likelihood(model, chat, session.collator.source, tokens_per_pack, torch.float32, compiled=False)
        found = [value for batch in likelihood.logprobs([examples[:9], examples[9:]]) for _, value in batch]
        assert found == pytest.approx([expected[one] for one in wanted], rel=TOLERANCE)

    chosen = dict(choice.answer(model, range(len(choice.batches)), shows_progress=False))
    assert len(choice.batches) > 2 and choice.num_in(chosen) == len(questions.asked)
    for batch, answers in chosen.items():
        for number, answer in zip(choice.batches[batch], answers, strict=True):
            assert answer.text == max(ANSWERS, key=lambda text: expected[number, text])
            assert answer.token_ids[-1] == chat.tokenizer.eos_token_id and answer.ended == "stop"


@pytest.fixture(scope="module")
def run(make_run_in, sample, built, tmp_path_factory) -> RunFile:
    """A finished run without candidates; one of its validation questions has none in training."""
    folder = tmp_path_factory.mktemp("candidates")
    asked = read_records(sample / "val.jsonl")[:12]
    unknown = replace(asked[0], turns=(Turn("Is it a cat?", "no"),))
    write_records(folder / "val.jsonl", [*asked, unknown], image_root=sample)
    run = make_run_in(
        folder,
        data={"val": str(folder / "val.jsonl"), "test": [], "image_root": str(sample)},
        cache={"dir": str(built.folder.parent)},
        train={"steps": 6, "learning_rate": 0.01},
        eval={"max_new_tokens": 2},
    )
    train(run, **QUIET)
    return run


def results(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for name in ("predictions", "metrics") for path in (folder / name).iterdir()}


def test_a_finished_run_gets_candidates_beside_its_greedy_answers(run, monkeypatch):
    """All in one test, since each part needs what the one before has written."""
    folder, notes = run.output, []
    greedy = [row.predicted for row in read_predictions(folder / "predictions" / "val.jsonl")]
    monkeypatch.setattr("lookonce.eval.answers.candidates.choice.CANDIDATES_OF_BATCH", 6)
    known = {"assignments": ["eval.candidates=training"], "notify": notes.append}
    evaluation, path = evaluate_run(folder, **known)
    rows, whole = read_predictions(path), results(folder)
    assert [row.predicted for row in rows] == greedy and set(whole) == {"val.jsonl", "val.json"}
    *others, unknown = rows
    assert unknown.candidate is None and unknown.num_candidates is None and unknown.chosen == unknown.predicted
    answers = training_answers(read_records(run.data.train[0]))
    assert all(row.candidate in answers[row.question] and row.candidate_logprob < 0 for row in others)
    assert [row.num_candidates for row in others] == [len(answers[row.question]) for row in others]
    score = evaluation.candidates
    assert score.num_questions == 12 and json.loads(whole["val.json"])["candidates"]["num_questions"] == 12
    assert score.difference == pytest.approx(score.exact_match - evaluation.overall.exact_match)
    said = next(note for note in notes if note.startswith("candidates:"))
    assert said.startswith("candidates: 12 questions with ") and said.endswith("; 1 without keep their greedy answers")

    for _ in range(2):  # after the greedy answers, which are one batch, and after the first candidates
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_after(patch, 1)
            evaluate_run(folder, **known)
    assert (folder / "predictions" / "val-candidates.partial-0.jsonl").exists()
    evaluate_run(folder, **known)
    assert results(folder) == whole
    first, second = [note for note in notes if note.startswith("continuing")][-2:]
    assert first == "continuing an evaluation: 13 of 13 questions were answered before"
    assert second.endswith(" of 12 questions had their candidates scored before")

    scored, _ = evaluate_run(folder, baselines="all", **known)
    assert scored.candidates == score and notes[-1] == "the answers of val are on disk"
    with pytest.raises(RunFolderError, match="holds another run"):
        evaluate_run(folder, assignments=["lora.rank=3"])

    without, _ = evaluate_run(folder, **QUIET)
    assert without.candidates is None and '"candidate"' not in path.read_text()
