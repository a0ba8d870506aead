"""A step that learns from rewards equals the published formula over separate rows of the stock model, and TRL's."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.sample import load_stock_processor
from support.trainings import COMPILED_ON_GPU, SIZES, Step, assert_same, difference, gradients, in_float64

from lookonce.datasets.records import Record, read_records, write_records
from lookonce.errors import TrainingError
from lookonce.run.config import RunFile
from lookonce.run.grpo import GrpoSection
from lookonce.run.open import FROM_CACHE, TO_BUILD, OpenRun, open_run
from lookonce.run.sections import BatchSection
from lookonce.train.data.dataset import DataCollatorForPacks, VQADataset
from lookonce.train.data.policy import Drawn, RewardStep
from lookonce.train.data.tokenize import Example, to_messages
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.first_pack import VARIABLE, FirstPack, first_pack_of
from lookonce.train.loop.rewards import Asked, RewardTrainer
from lookonce.train.loop.session import make_trainer
from lookonce.train.model.load import load_with_tower, without_adapter
from lookonce.train.model.loss import LOG_PROBS, REWARD_KEYS, RewardLoss
from lookonce.train.model.packs import packed_attention, share_of_loss

NUM_DRAWN, LONGEST = 6, 5
ON_GPU = [one for one in COMPILED_ON_GPU if one.name != "usefixtures"]
"""The same marks for a parameter, which takes no fixtures."""
PACK = 350
"""Tokens of a pack: too few for all answers."""


@pytest.fixture(scope="module")
def session(sample: Path, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """Three images of several sizes with 1, 3 and 2 questions, and two images at once."""
    everything, folder = read_records(sample / "train.jsonl"), tmp_path_factory.mktemp("rewards")
    images = list(dict.fromkeys(record.images for record in everything))
    turns = list({record.turns[0].question: record.turns[0] for record in everything}.values())
    records = [
        Record(shown, (turn,))
        for shown, number in zip(images, (1, 3, 2), strict=False)
        for turn in random.Random(number).sample(turns, number)
    ]
    records.append(Record((*images[0], *images[1]), (turns[0],)))
    write_records(folder / "records.jsonl", records, image_root=sample)
    data = {"train": str(folder / "records.jsonl"), "val": [], "test": [], "image_root": str(sample)}
    built = open_run(make_run_in(folder, data=data, cache=SIZES), TO_BUILD)
    built.build()
    return open_run(built.run, FROM_CACHE)


def prompts_of(session: OpenRun) -> list[Example]:
    chat, keys_of, grid_of = session.chat_tokenizer, session.images.keys_of, session.cache.grid_thw
    return [
        chat.question(record, 0, keys_of(record), [*map(grid_of, keys_of(record))])
        for record in session.records["train"]
    ]


def drawn_answers(session: OpenRun, seed: int = 0) -> list[list[Drawn]]:
    """Answers of random tokens to each question: some equal, some cut off; to one question all have equal rewards."""
    rng, end = random.Random(seed), int(session.chat_tokenizer.tokenizer.eos_token_id)
    never = {*session.chat_tokenizer.special_token_ids, session.chat_tokenizer.image_token_id}
    tokens = [number for number in range(len(session.chat_tokenizer.tokenizer)) if number not in never]
    groups = []
    for question in range(len(session.records["train"])):
        group = []
        for _ in range(NUM_DRAWN - 2):
            is_cut = rng.random() < 0.25
            length = LONGEST if is_cut else rng.randrange(LONGEST)
            ids = (*rng.choices(tokens, k=length), *(() if is_cut else (end,)))
            group.append(Drawn(ids, 1.0 if question == 2 else rng.choice((0.0, 0.25, 1.0)), is_cut))
        group += [group[1], group[0]]  # drawn again
        groups.append(group)
    return groups


@dataclass
class Rows:
    """All answers as rows of the stock model with its tower, as a trainer without packs has them."""

    model: Any
    inputs: dict[str, torch.Tensor]
    completions: torch.Tensor
    mask: torch.Tensor
    """`[N, T]`, 1 for the tokens of an answer."""

    @classmethod
    def of(cls, session: OpenRun, model: Any, processor: Any, drawn: Sequence[Sequence[Drawn]]) -> Rows:
        """Prompts padded on the left and images by transformers' own processor, answers padded on the right."""
        rows = [
            (record, answer) for record, group in zip(session.records["train"], drawn, strict=True) for answer in group
        ]
        processor.image_processor.size = {"shortest_edge": SIZES["min_pixels"], "longest_edge": SIZES["max_pixels"]}
        texts = [
            processor.apply_chat_template(to_messages(record)[:-1], tokenize=False, add_generation_prompt=True)
            for record, _ in rows
        ]
        images = [Image.open(path).convert("RGB") for record, _ in rows for path in record.images]
        inputs = dict(processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt"))
        ids = torch.full((len(rows), LONGEST), processor.tokenizer.pad_token_id)
        mask = torch.zeros(len(rows), LONGEST, dtype=torch.long)
        for row, (_, answer) in enumerate(rows):
            ids[row, : len(answer.token_ids)] = torch.tensor(answer.token_ids)
            mask[row, : len(answer.token_ids)] = 1
        more = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": torch.zeros_like(ids)}
        joined = {name: torch.cat([inputs[name], tensor], dim=1) for name, tensor in more.items() if name in inputs}
        return cls(model, inputs | joined, ids, mask)

    @cached_property
    def logits(self) -> torch.Tensor:
        """`[N, T, vocabulary]`, with a graph for any number of backward passes."""
        logits: torch.Tensor = self.model(**self.inputs, use_cache=False).logits[:, -LONGEST - 1 : -1]
        return logits

    def log_probs(self, temperature: float = 1.0) -> torch.Tensor:
        """`[N, T]`"""
        scaled = self.logits / temperature
        return scaled.log_softmax(-1).gather(-1, self.completions[..., None])[..., 0]


@dataclass
class Bench:
    """A model on packs and the same on rows, with another one that is not trained, to have drawn from or to compare."""

    session: OpenRun
    ours: Any
    rows: Rows
    drawn: list[list[Drawn]]
    old: torch.Tensor
    """`[N, T]`: log-probabilities by other weights, as after some steps with the same answers."""
    unadapted: Rows
    """The rows without the adapter."""

    def step(self, options: GrpoSection, tokens_per_pack: int = PACK) -> RewardStep:
        batch = BatchSection(tokens_per_pack=tokens_per_pack)
        token_id = self.session.chat_tokenizer.image_token_id
        return RewardStep.of(prompts_of(self.session), self.drawn, options, batch, token_id)

    def batches(self, step: RewardStep) -> list[dict[str, Any]]:
        chat, features, device = self.session.chat_tokenizer, self.session.features, next(self.ours.parameters()).device
        dataset = VQADataset.of([], chat, features)
        collator = DataCollatorForPacks(dataset, device=device, pads_to_blocks=device.type == "cuda")
        return [step.collate(indices, collator) for indices in step.packs()]

    def in_packs(self, step: RewardStep, loss_of: RewardLoss, *, captured: bool = False) -> Step:
        """Loss and gradients of one pass over the step; keeps the log-probabilities of the targets."""
        self.ours.zero_grad()
        total = 0.0
        with packed_attention(self.ours, captured=captured, of_rewards=loss_of):
            for indices, batch in zip(step.packs(), self.batches(step), strict=True):
                loss = share_of_loss(self.ours, batch)
                loss.backward()
                total += loss.item()
                step.keep(indices, batch[LOG_PROBS][0].cpu().numpy())
        return total, gradients(self.ours)

    def give(self, step: RewardStep, old: torch.Tensor | None = None, reference: torch.Tensor | None = None) -> None:
        """Give a step the log-probabilities of all rows."""
        flat = [answer for group in self.drawn for answer in group]
        prompts = [prompt for prompt in prompts_of(self.session) for _ in range(NUM_DRAWN)]
        for answer in step.answers:
            whole = answer.example.token_ids.tolist()
            row = next(
                number
                for number, (drawn, prompt) in enumerate(zip(flat, prompts, strict=True))
                if [*prompt.token_ids.tolist(), *drawn.token_ids] == whole
                and prompt.image_keys == answer.example.image_keys
            )
            for kept, known in ((answer.old, old), (answer.reference, reference)):
                if known is not None:
                    kept[:] = known[row, : len(kept)].numpy()


@pytest.fixture(scope="module")
def bench(session: OpenRun, random_lora: Callable[..., Any], sample: Path) -> Bench:
    with pytest.MonkeyPatch.context() as patch:
        processor = load_stock_processor(sample / "model", patch)
    model, drawn = random_lora(session, load_with_tower), drawn_answers(session)
    rows = Rows.of(session, model, processor, drawn)
    rows.logits  # noqa: B018  (computed with its graph)
    with torch.no_grad():
        own, unadapted = rows.log_probs(), replace(rows)
        with without_adapter(model):
            unadapted.logits  # noqa: B018
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    for start in range(0, len(noise), NUM_DRAWN):
        group = [answer.token_ids for answer in drawn[start // NUM_DRAWN]]
        noise[start : start + NUM_DRAWN] = noise[[start + group.index(ids) for ids in group]]  # equal for equal answers
    return Bench(session, random_lora(session), rows, drawn, own + 0.4 * noise, unadapted)


def formula(
    bench: Bench,
    options: GrpoSection,
    log_probs: torch.Tensor,
    old: torch.Tensor | None,
    reference: torch.Tensor,
) -> torch.Tensor:
    """The loss of GRPO as published, one row at a time: equation 3 of arXiv 2402.03300, with the mean of arXiv
    2503.14476 for `token` and its questions without differences left out for `filter`."""
    terms: list[torch.Tensor] = []
    sizes: list[int] = []
    for question, group in enumerate(bench.drawn):
        rewards = torch.tensor([answer.reward for answer in group])
        if options.filter and rewards.max() == rewards.min():
            continue
        better = rewards - rewards.mean()
        if options.scale == "std":
            better = better / (rewards.std() + 1e-4)
        for number, answer in enumerate(group):
            row, length = question * NUM_DRAWN + number, len(answer.token_ids)
            own = log_probs[row, :length]
            ratio = (own - (own.detach() if old is None else old[row, :length])).exp()
            low, high = options.clip
            each = -torch.min(ratio * better[number], ratio.clamp(1 - low, 1 + high) * better[number])
            towards = reference[row, :length] - own
            each = each + options.kl * (towards.exp() - towards - 1)
            is_left_out = answer.is_cut and options.cut == "masked"
            terms.append(each.sum() * (not is_left_out) / (length if options.loss == "sequence" else 1))
            sizes.append(1 if options.loss == "sequence" else length * (not is_left_out))
    return torch.stack(terms).sum() / sum(sizes)


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "by sequence": {"loss": "sequence", "kl": 0.3},
    "all questions count": {"filter": False},
    "all questions count, by sequence": {"filter": False, "loss": "sequence", "scale": "none", "clip": [0.05, 0.1]},
    "kl, punished": {"filter": False, "kl": 0.3, "scale": "none", "cut": "punished"},
    "kl by sequence": {"filter": False, "kl": 0.3, "loss": "sequence"},
    "temperature": {"filter": False, "temperature": 0.7},
}


def expected_step(bench: Bench, options: GrpoSection, old: torch.Tensor | None, loss_of: Any = formula) -> Step:
    bench.rows.model.zero_grad()
    loss = loss_of(
        bench, options, bench.rows.log_probs(options.temperature), old, bench.unadapted.log_probs(options.temperature)
    )
    loss.backward(retain_graph=True)
    return loss.item(), gradients(bench.rows.model)


def reward_loss(options: GrpoSection) -> RewardLoss:
    return RewardLoss((options.clip[0], options.clip[1]), options.kl, options.temperature)


def trl_loss(
    bench: Bench, options: GrpoSection, log_probs: torch.Tensor, old: torch.Tensor | None, reference: torch.Tensor
) -> torch.Tensor:
    """The loss that TRL's GRPOTrainer computes of the same answers.

    Its method is called on an object that has only what the method reads, since the trainer itself would draw other
    answers; the log-probabilities are those of the stock model, the advantages those of the formula.
    """
    trl: Any = pytest.importorskip("trl.trainer.grpo_trainer")
    accelerator = SimpleNamespace(
        num_processes=1, reduce=lambda x, **kwargs: x, gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    rewards = torch.tensor([[answer.reward for answer in group] for group in bench.drawn])
    better = rewards - rewards.mean(dim=1, keepdim=True)
    if options.scale == "std":
        better = better / (trl.nanstd(rewards, dim=1)[:, None] + 1e-4)
    is_left_out = [options.cut == "masked" and answer.is_cut for group in bench.drawn for answer in group]
    mask = bench.rows.mask * ~torch.tensor(is_left_out)[:, None]
    trainer: Any = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    vars(trainer).update(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=accelerator,
        loss_type={"token": "dapo", "sequence": "grpo"}[options.loss],
        beta=options.kl,
        epsilon_low=options.clip[0],
        epsilon_high=options.clip[1],
        importance_sampling_level="token",
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (log_probs, torch.zeros_like(log_probs), None),
    )
    nothing = torch.zeros(len(mask), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": bench.rows.completions,
        "completion_mask": mask,
        "advantages": better.flatten(),
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    loss: torch.Tensor = trainer._compute_loss(None, inputs if old is None else inputs | {"old_per_token_logps": old})
    return loss


FORMULA = pytest.mark.guarantee(
    "A step that learns from rewards has the loss and gradients of the published formula over separate rows of the"
    " stock model, to 1e-5 in float32, and a training takes these steps."
)


@FORMULA
@pytest.mark.parametrize("iteration", ["first", "later"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_published_formula_over_rows_and_that_of_trl(bench, case, iteration):
    """Loss and gradients equal those of separate rows of the stock model with its tower, to 1e-5 in float32."""
    options = GrpoSection(**CASES[case])
    old = bench.old if iteration == "later" else None
    step = bench.step(options)
    bench.give(step, old, bench.unadapted.log_probs(options.temperature))
    found = bench.in_packs(step, reward_loss(options))
    assert len(step.packs()) > 1 and len(step.answers) < len(bench.drawn) * NUM_DRAWN
    assert_same(found, expected_step(bench, options, old))
    if not options.filter:  # which TRL has not
        assert_same(found, expected_step(bench, options, old, trl_loss))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_drawn_tokens_in_packs_are_those_of_rows(bench, temperature):
    """Of the model as it is, which the next iteration takes for the old ones, and without the adapter."""
    options = GrpoSection(temperature=temperature, filter=False, kl=0.1, cut="punished")
    step, expected = bench.step(options), bench.step(options)
    bench.in_packs(step, reward_loss(options))
    with packed_attention(bench.ours, of_rewards=reward_loss(options)), torch.no_grad(), without_adapter(bench.ours):
        for indices, batch in zip(step.packs(), bench.batches(step), strict=True):
            share_of_loss(bench.ours, batch)
            step.keep(indices, batch[LOG_PROBS][0].numpy(), of_reference=True)
    with torch.no_grad():
        bench.give(expected, bench.rows.log_probs(temperature), bench.unadapted.log_probs(temperature))
    for found, right in zip(step.answers, expected.answers, strict=True):
        np.testing.assert_allclose(found.old, right.old, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found.reference, right.reference, rtol=0, atol=1e-5)
        assert abs(found.old - found.reference).max() > 1e-3


def test_the_second_iteration_compares_with_what_the_first_one_has_kept(bench):
    """The weights change between the two; the third is compared with the first one too.

    Gradients of better and worse answers cancel out, so rounding is a larger part of them: rows are 3.1e-5 from float64
    on a processor where packs are 2.2e-5 from rows.
    """
    options = GrpoSection(filter=False, kl=0.2, clip=[0.1, 0.1])
    step = bench.step(options)
    bench.give(step, reference=bench.unadapted.log_probs())
    own = bench.rows.log_probs().detach()
    bench.in_packs(step, reward_loss(options))
    ours, stock = copy.deepcopy(bench.ours), copy.deepcopy(bench.rows.model)
    changed = replace(bench, ours=ours, rows=replace(bench.rows, model=stock))
    for name, weight in (*ours.named_parameters(), *stock.named_parameters()):
        weight.data *= 0.7 if "lora_B" in name else 1
    of_rows = expected_step(changed, options, own)
    with in_float64():
        exact = expected_step(
            replace(changed, rows=replace(changed.rows, model=copy.deepcopy(stock).double())), options, own
        )
    for _ in range(2):
        found = changed.in_packs(step, reward_loss(options))
        assert difference(found, of_rows) < max(1e-5, difference(of_rows, exact))
    assert ((changed.rows.log_probs() - own).abs() > 0.1).any(), "some ratios are clipped"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_captured_passes_give_the_same_whatever_an_earlier_pack_has_left(bench, exact_float32, device):
    bench = replace(bench, ours=copy.deepcopy(bench.ours).to(device))
    options = GrpoSection(filter=False, kl=0.3)
    step, launched = bench.step(options), bench.step(options)
    bench.give(launched, reference=bench.unadapted.log_probs())
    bench.in_packs(launched, reward_loss(options))  # keeps the log-probabilities
    bench.give(step, bench.old, bench.unadapted.log_probs())
    expected = bench.in_packs(step, reward_loss(options))
    with packed_attention(bench.ours, captured=True, of_rewards=reward_loss(options)) as passes:
        for garbage in (None, torch.nan, torch.inf):  # of the first round two packs are launched
            bench.ours.zero_grad()
            total = 0.0
            for indices, batch in zip(step.packs(), bench.batches(step), strict=True):
                for _, inputs, _ in passes._captured._captured.values() if garbage else ():
                    for name in REWARD_KEYS:
                        inputs[name].fill_(garbage)
                loss = share_of_loss(bench.ours, batch)
                loss.backward()
                total += loss.item()
                kept = launched.tensors(indices)["old_log_probs"]
                torch.testing.assert_close(batch[LOG_PROBS].cpu(), kept, rtol=0, atol=1e-5)
            assert_same((total, gradients(bench.ours)), expected)
    assert passes._captured._captured


@dataclass
class Given:
    """Draws the answers of the bench; prompts are asked in any order."""

    drawn: list[list[Drawn]]
    tokens_per_batch: int | None = None
    sampling_seconds: float = 0.0
    rewarding_seconds: float = 0.0

    def __call__(self, model: Any, asked: Asked, seed: int) -> list[list[Drawn]]:
        assert sorted(number for number, _ in asked) == [*range(len(self.drawn))]
        return [self.drawn[number] for number, _ in asked]


def trainer_of(bench: Bench, folder: Path, options: GrpoSection, **arguments: Any) -> RewardTrainer:
    """A trainer that takes steps of plain gradient descent with the answers of the bench."""
    run = bench.session.run
    changes = {
        "grpo": options,
        "batch": BatchSection(samples_per_step=len(bench.drawn), tokens_per_pack=PACK),
        "train": run.train.model_copy(
            update={"objective": "grpo", "optimizer": "sgd", "learning_rate": RATE, "max_grad_norm": 0.0}
            | {"scheduler": "constant", "warmup": 0.0}
            | arguments
        ),
    }
    opened = bench.session.changed(run=run.model_copy(update=changes))
    settings = training_arguments(opened.run, folder, save_strategy="no", use_cpu=True)
    model = copy.deepcopy(bench.ours)
    trainer = make_trainer(opened, model, settings, prompts_of(bench.session), draw=Given(bench.drawn))
    assert isinstance(trainer, RewardTrainer)
    return trainer


RATE = 0.05


@FORMULA
@pytest.mark.parametrize(
    ("case", "changes"), [("defaults", {}), ("kl, punished", {"loss": "sequence", "temperature": 0.7})]
)
def test_a_training_takes_the_steps_of_the_formula(bench, tmp_path, case, changes):
    """Three steps with the same answers and one with answers drawn again, compared with rows of the stock model on
    which the formula is descended; the reference are the weights that the training begins with."""
    options = GrpoSection(**CASES[case] | changes | {"iterations": 3, "clip": [0.01, 0.02]})
    trainer = trainer_of(bench, tmp_path, options, steps=4)
    trainer.train()
    stock = copy.deepcopy(bench.rows.model)
    changed = replace(bench, rows=replace(bench.rows, model=stock), unadapted=replace(bench.rows))
    old, is_clipped = None, False
    for step in range(4):
        changed = replace(changed, rows=replace(changed.rows, model=stock))
        now = changed.rows.log_probs(options.temperature).detach()
        old = now if step % 3 == 0 else old
        is_clipped |= bool(((now - old).exp() - 1).abs().max() > 0.02)
        _, descent = expected_step(changed, options, None if step % 3 == 0 else old)
        with torch.no_grad():
            for name, weight in stock.named_parameters():
                if name in descent:
                    weight -= RATE * descent[name]
    assert is_clipped, "so that clipping matters"
    begun = dict(bench.ours.named_parameters())
    for name, weight in trainer.model.named_parameters():
        if weight.requires_grad:
            moved, expected = weight - begun[name], dict(stock.named_parameters())[name] - begun[name]
            assert expected.norm() > 0 and (moved - expected).norm() < 1e-4 * expected.norm(), name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_pack_of_rewards_is_checked_with_invented_answers(bench, tmp_path, monkeypatch, temperature):
    monkeypatch.delenv(VARIABLE, raising=False)
    trainer = trainer_of(bench, tmp_path, GrpoSection(samples=4, max_new_tokens=6, temperature=temperature), steps=1)
    trainer.collator.pads_to_blocks = True
    trainer.first_pack = FirstPack(trainer, first_pack_of(trainer, 0))
    with trainer._on_packs():
        note = trainer.first_pack.check(trainer.model)
        assert note.startswith("the first pack agrees with its questions as separate rows")
        assert sum(answer.example.num_targets for answer in trainer.step.answers) == 7 * 4 * 6
        loss_of = trainer.of_rewards
        for wrong in (replace(loss_of, temperature=0.9), replace(loss_of, kl=0.5, temperature=0.8)):
            monkeypatch.setattr(trainer.passes, "_of_rewards", wrong)
            with pytest.raises(TrainingError, match="packs are not exact on this machine"):
                trainer.first_pack.check(trainer.model)
