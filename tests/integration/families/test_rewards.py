"""In each family, answers drawn to questions have the loss of rewards, and its gradients, as in separate rows."""

from __future__ import annotations

import random
from typing import Any

import torch
from support.trainings import Step, gradients

from lookonce.run.grpo import GrpoSection
from lookonce.run.open import OpenRun
from lookonce.run.sections import BatchSection
from lookonce.train.data.batches import IGNORED, image_inputs, image_keys
from lookonce.train.data.dataset import DataCollatorForPacks, VQADataset
from lookonce.train.data.policy import Drawn, RewardStep
from lookonce.train.model.load import load_without_tower
from lookonce.train.model.loss import LOSS_KEYS, RewardLoss
from lookonce.train.model.packs import packed_attention, share_of_loss

TOLERANCE = 1e-5
NUM_DRAWN = 3


def drawn_step(session: OpenRun) -> RewardStep:
    """Random answers to the questions of records with images."""
    rng, chat = random.Random(0), session.chat_tokenizer
    never = {*chat.special_token_ids, chat.image_token_id}
    tokens, end = [number for number in range(len(chat.tokenizer)) if number not in never], chat.tokenizer.eos_token_id
    prompts, drawn = [], []
    for record in session.records["train"]:
        if keys := session.images.keys_of(record):
            prompts.append(chat.question(record, len(record.turns) - 1, keys, [*map(session.cache.grid_thw, keys)]))
            answers = [(*rng.choices(tokens, k=rng.randrange(4)), end) for _ in range(NUM_DRAWN)]
            drawn.append([Drawn(ids, float(number)) for number, ids in enumerate(answers)])
    batch = BatchSection(tokens_per_pack=500)
    return RewardStep.of(prompts, drawn, GrpoSection(samples=NUM_DRAWN), batch, chat.image_token_id)


def in_packs(model: Any, session: OpenRun, step: RewardStep) -> Step:
    collator = DataCollatorForPacks(VQADataset.of([], session.chat_tokenizer, session.features))
    total = 0.0
    model.zero_grad()
    with packed_attention(model, of_rewards=RewardLoss()):
        for indices in step.packs():
            loss = share_of_loss(model, step.collate(indices, collator))
            loss.backward()
            total += loss.item()
    assert len(step.packs()) > 1
    return total, gradients(model)


def in_rows(model: Any, session: OpenRun, step: RewardStep, at_once: int) -> Step:
    """The gradient of the loss at the weights that drew the answers: of the weighted sum of advantages."""
    rows, total = session.row_collator(), 0.0
    model.zero_grad()
    for start in range(0, len(step.answers), at_once):
        answers = step.answers[start : start + at_once]
        examples = [answer.example for answer in answers]
        batch = rows.text_batch(examples, [1.0] * len(examples)) | image_inputs(rows.source, image_keys(examples))
        inputs = {name: tensor for name, tensor in batch.items() if name not in LOSS_KEYS}
        log_probs = model(**inputs, use_cache=False).logits.log_softmax(-1)
        is_target = batch["targets"] != IGNORED
        chosen = log_probs.gather(-1, batch["targets"].where(is_target, 0)[..., None])[..., 0]
        times = torch.tensor([answer.advantage * answer.weight for answer in answers])[:, None]
        loss = -(times * is_target * (chosen - chosen.detach()).exp()).sum()
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def difference(found: Step, expected: Step) -> float:
    """The largest relative difference of the loss and of any gradient."""
    each = [((found[1][name] - gradient).norm() / gradient.norm()).item() for name, gradient in expected[1].items()]
    assert found[1].keys() == expected[1].keys()
    return max(abs(found[0] / expected[0] - 1), *each)


def test_packs_of_drawn_answers_are_rows_in_each_family(session, random_lora):
    """To 1e-5 in float32; with linear attention, which rounds more, or as near as rows are to one another."""
    step, model = drawn_step(session), random_lora(session, load_without_tower)
    expected = in_rows(model, session, step, at_once=100)
    is_linear = "linear_attention" in session.model_folder.family.layer_types
    rounding = difference(in_rows(model, session, step, at_once=1), expected) if is_linear else 0.0
    assert difference(in_packs(model, session, step), expected) < max(TOLERANCE, rounding)
