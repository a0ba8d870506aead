"""Training by rewards (GRPO): each step draws answers with the weights of this moment, and learns from them.

A step of `PackTrainer` is an iterator of batches. Here it draws before its first batch; all else of the loop is
Trainer's. How answers are drawn and what they are worth is handed in (`Draw`), since decoding and metrics lie above
training. Answers depend on the weights, the seed, the step and the question alone, and all ranks know all of them.

Questions come from a stream, epoch after epoch. With `grpo.filter` those whose answers teach nothing are replaced by
the next ones until the step is full; a step asks no question twice, nor more than `MOST` times its own number. So the
place in the stream depends on the answers, and checkpoints have it. If no question is left from which anything can be
learned, the training ends with that step. With several `iterations` the answers of a step serve the next ones too, and
a checkpoint between them has these answers.

The reference of the KL divergence are the weights with which the training began: LoRA's B is 0 at first, which is the
model without the adapter, or they are those of `train.start_from`.

The trial in front of a training has invented answers of the largest length, with which packs are as long and have as
many targets as they ever will.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from lookonce.errors import TrainingError
from lookonce.files import write_json
from lookonce.run.folder import AGAIN, read_form
from lookonce.run.grpo import GrpoSection
from lookonce.text import count
from lookonce.train.data.batches import Batch, Prefetcher
from lookonce.train.data.dataset import PackIndices
from lookonce.train.data.policy import MEASURES, Drawn, QuestionStream, RewardStep, teaches
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.checkpoints import REWARDS
from lookonce.train.loop.trainer import PackTrainer, num_tokens
from lookonce.train.model.compile import num_compiled_graphs
from lookonce.train.model.loss import LOG_PROBS, RewardLoss
from lookonce.train.model.packs import share_of_loss

ANSWERS = "drawn.json"
"""The file in a checkpoint with the answers that the next step has too."""
MOST = 100
"""How many times as many questions as it has a step may ask, or one could take hours."""
SHOWN = 2
"""Questions of a logged step whose answers are shown."""
Asked = Sequence[tuple[int, Example]]
"""Questions by their numbers, with their prompts."""
Shown = tuple[int, Sequence[Drawn]]
"""The number of a question, and the answers to it."""


class Draw(Protocol):
    """Draws answers with a model, and says what they are worth."""

    tokens_per_batch: int | None
    """How many tokens are answered together: kept in checkpoints, as answers in bfloat16 may depend on it."""
    sampling_seconds: float
    rewarding_seconds: float
    """What both took so far."""

    def __call__(self, model: Any, asked: Asked, seed: int) -> list[list[Drawn]]:
        """The answers to each question, of all ranks; the same seed, question and weights give the same.

        The model stays in its mode: in training.
        """
        ...


class _Kept(BaseModel):
    """Answers that the next step has too."""

    model_config = ConfigDict(extra="forbid")

    positions: list[Annotated[int, Field(ge=0)]]
    """Of the questions, in the stream."""
    drawn: list[list[Drawn]]
    old: list[list[float]]
    reference: list[list[float]] | None


class RewardTrainer(PackTrainer):
    """A `PackTrainer` whose steps have answers that the model draws; its sampler orders questions."""

    def __init__(self, *args: Any, options: GrpoSection, draw: Draw, **others: Any) -> None:
        """`options` is the run file's section `grpo`; all else as for `PackTrainer`, with questions for examples."""
        super().__init__(*args, **others)
        self.options, self.draw = options, draw
        self.of_rewards = RewardLoss((options.clip[0], options.clip[1]), options.kl, options.temperature)
        dataset, self._plan = self.train_sampler.dataset, self.train_sampler.plan
        self._stream = QuestionStream(self._plan.examples, self._plan, dataset.variants)
        self.step: RewardStep | None = None
        """What is trained on; in front of a training, invented answers."""
        self.show: Callable[[int, Sequence[Shown]], None] | None = None
        """Is called with the number of a logged step, and some of its questions."""
        self._teaches_nothing = False
        """Whether it was said that nothing is learned."""
        self._kept: tuple[list[int], list[Sequence[Drawn]]] = [], []
        """The positions of the questions of the step in the stream, and the answers to them."""
        self._position = 0
        """Where the next step's questions begin in the stream."""
        self._sums: dict[str, float] = defaultdict(float)
        """What is logged, summed since the line before."""
        self._waited_before, self._has_notified = 0.0, False
        self._reference = [weight.detach().clone() for weight in self._trained()] if options.kl else []

    def _trained(self) -> list[torch.Tensor]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]  # type: ignore[union-attr]

    # In front of the first step.

    def first_packs(self, step: int) -> list[PackIndices]:
        """Those of invented answers."""
        self.step = self.step or self._invented()
        return self._packs()

    def upcoming(self, start: int, end: int) -> tuple[list[PackIndices], Mapping[int, Example]]:
        """Those of invented answers: none will be longer."""
        self.first_packs(start)
        assert self.step
        packs = [pack for rank in range(self._plan.num_ranks) for pack in self._packs(rank)]
        return packs, {number: answer.example for number, answer in enumerate(self.step.answers)}

    def _invented(self) -> RewardStep:
        """Different answers of the largest length, to the longest questions: those of a step, or enough for two packs a
        rank."""
        longest = sorted(self._plan.examples, key=lambda prompt: -prompt.num_tokens)[: self._num_questions]
        words = [token for token in {*longest[0].token_ids.tolist()} if token != self._image_token_id]
        length, tokens = self.options.max_new_tokens, np.random.default_rng(0)
        enough = 2 * self._plan.num_ranks * self.train_sampler.batch.tokens_per_pack
        size = max(2, min(self.options.samples, enough // length)), length
        prompts = longest[: max(1, enough // (size[0] * length))]
        answers = [tokens.choice(words, size).tolist() for _ in prompts]
        drawn = [[Drawn(ids, float(n % 2)) for n, ids in enumerate(group)] for group in answers]
        return self._step_of(prompts, drawn)

    # Steps.

    @property
    def _num_questions(self) -> int:
        return min(self.train_sampler.batch.samples_per_step, len(self._plan.examples))

    @property
    def _image_token_id(self) -> int:
        return self.train_sampler.dataset.chat_tokenizer.image_token_id

    def _step_of(self, prompts: Sequence[Example], drawn: Sequence[Sequence[Drawn]]) -> RewardStep:
        return RewardStep.of(prompts, drawn, self.options, self.train_sampler.batch, self._image_token_id)

    def _packs(self, rank: int | None = None) -> list[PackIndices]:
        assert self.step
        return self.step.packs(self._plan.rank if rank is None else rank, self._plan.num_ranks)

    def batch_of(self, indices: PackIndices) -> Batch:
        """The batch of a pack of the step, on the device."""
        assert self.step
        return self.step.collate(indices, self.collator)

    def examples_of(self, indices: PackIndices) -> Mapping[int, Example]:
        """The examples of a pack of the step by their numbers."""
        assert self.step
        return {number: self.step.answers[number].example for number in indices}

    def _next_step(self) -> Iterator[tuple[Batch, bool]]:
        """Draw the answers of a step, and hand out the batches of its packs."""
        if is_first := self.state.global_step % self.options.iterations == 0:
            self._draw_step()
        began, packs = time.perf_counter(), self._packs()
        self._tokens_ahead.append(num_tokens(packs))
        if self.options.kl and is_first:
            with self._compiling_apart():
                self._keep_reference(packs)
        if not packs:
            for weight in self._trained():
                weight.grad = torch.zeros_like(weight)
        computed: list[tuple[PackIndices, torch.Tensor]] = []
        self._ahead = Prefetcher(iter([packs] if packs else []), self.batch_of, self.args.device, self.num_ahead)
        for indices, (batch, is_last) in zip(packs, self._ahead.step(), strict=True):
            yield batch, is_last
            computed.append((indices, batch[LOG_PROBS]))
        self._note_passes(computed)
        self._waited_before = self._waited
        self.stop_prefetch()
        self._add(training_seconds=time.perf_counter() - began, steps=1)

    @property
    def _waited(self) -> float:
        return self._waited_before + super()._waited

    @contextlib.contextmanager
    def _compiling_apart(self) -> Iterator[None]:
        """Do not count what is compiled within the block as a recompilation of the step's passes."""
        num_graphs = num_compiled_graphs()
        yield
        self.compiled_apart += num_compiled_graphs() - num_graphs

    def _draw_step(self) -> None:
        """Draw answers to questions until the step is full."""
        positions: list[int] = []
        groups: list[Sequence[Drawn]] = []
        step, seconds = self.state.global_step, self._seconds
        answers: dict[int, Sequence[Drawn]] = {}
        """Those to each question, by its number."""
        most = min(len(self._plan.examples), MOST * self._num_questions)
        while len(groups) < self._num_questions and len(answers) < most:
            num = min(self._num_to_ask(len(groups), len(answers)), most - len(answers))
            places = self._not_asked(num, answers.keys())
            asked = list(map(self._stream.at, places))
            with self._compiling_apart():
                drawn = self.draw(self.model, asked, seed_of(self.args.seed, step))
            for place, (number, _), group in zip(places, asked, drawn, strict=True):
                answers[number] = group
                is_mixed = teaches(group, self.options, self._image_token_id)
                self._note_answers(group, is_mixed)
                if is_mixed or not self.options.filter:
                    positions.append(place)
                    groups.append(group)
                self._position = place + 1
                if len(groups) == self._num_questions:
                    break
        sampling, rewarding = (self._seconds - seconds).tolist()
        self._add(sampling_seconds=sampling, rewarding_seconds=rewarding)
        self._check_full(len(groups), [*answers.values()])
        self._take(positions, groups)

    def _not_asked(self, num: int, asked: Collection[int]) -> list[int]:
        """Where in the stream the next questions are that are not among those asked, by their numbers."""
        places: dict[int, int] = {}
        for place in itertools.count(self._position):
            number, _ = self._stream.at(place)
            if number not in asked:
                places.setdefault(number, place)
            if len(places) == num:
                break
        return [*places.values()]

    def _num_to_ask(self, num_found: int, num_asked: int) -> int:
        """How many questions are asked at once: as many as a step has, or a half, a quarter and so on if so many will
        do by the share of those found so far. There are few sizes, since passes are captured for each."""
        num, num_missing = self._num_questions, self._num_questions - num_found
        while num // 2 * num_found >= num_missing * max(num_asked, 1):
            num //= 2
        return num

    @property
    def _seconds(self) -> np.ndarray:
        return np.array([self.draw.sampling_seconds, self.draw.rewarding_seconds])

    def _take(self, positions: list[int], groups: list[Sequence[Drawn]]) -> RewardStep:
        """Train on some answers to the questions at some positions of the stream."""
        prompts = [self._stream.at(position)[1] for position in positions]
        self._kept, self.step = (positions, groups), self._step_of(prompts, groups)
        return self.step

    def _check_full(self, num: int, groups: Sequence[Sequence[Drawn]]) -> None:
        """Say that too few of the questions asked teach anything; end the training if none does."""
        step, answers = self.state.global_step, [answer for group in groups for answer in group]
        num_cut = sum(answer.is_cut for answer in answers)
        if not step and num_cut == len(answers) and self.options.cut == "masked":
            raise TrainingError(
                f"all answers of the first step were cut off after {count(self.options.max_new_tokens, 'token')}, so "
                "there is nothing to learn from; raise grpo.max_new_tokens, or set grpo.cut: punished"
            )
        if num == self._num_questions:
            return
        found = f"of {count(len(groups), 'question')} {num or 'none'} got answers that differ in reward"
        if num:
            if not self._has_notified:
                self._has_notified = True
                self.startup.notify(f"step {step + 1}: {found}, so it has fewer than {self._num_questions}")
            return
        if not step:
            mean = _mean(sum(answer.reward for answer in answers), len(answers))
            is_cut = num_cut > len(answers) / 2
            raise TrainingError(
                f"{found}, so there is nothing to learn from; their mean reward is {mean:.3g}, and "
                f"{num_cut / len(answers):.0%} were cut off after {count(self.options.max_new_tokens, 'token')}; "
                f"{'raise grpo.max_new_tokens, or ' if is_cut else ''}choose a reward with more values (grpo.reward), "
                "more grpo.samples, a higher grpo.temperature, an adapter that is right sometimes and not always "
                "(train.start_from), or other questions"
            )
        self.evaluations.ended_early = f"ended after step {step + 1:,} of {self.state.max_steps:,}: {found}"
        self.control.should_training_stop = True

    def _keep_reference(self, packs: Sequence[PackIndices]) -> None:
        """Compute the log-probabilities of the step's answers by the weights with which the training began."""
        assert self.step
        weights = self._trained()
        with torch.no_grad():
            now = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, self._reference)
            try:
                for indices in packs:
                    batch = self.batch_of(indices)
                    with self.compute_loss_context_manager():
                        share_of_loss(self.model, batch)
                    self.step.keep(indices, batch[LOG_PROBS][0].cpu().numpy(), of_reference=True)
            finally:
                torch._foreach_copy_(weights, now)

    # What is measured.

    def _add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._sums[name] += amount

    def _note_answers(self, group: Sequence[Drawn], is_mixed: bool) -> None:
        rewards = np.array([answer.reward for answer in group])
        self._add(
            questions=1,
            mixed=is_mixed,
            reward=float(rewards.mean()),
            spread=float(rewards.std()),
            answers=len(group),
            cut=sum(answer.is_cut for answer in group),
            tokens=sum(len(answer.token_ids) for answer in group),
            log_prob=sum(sum(answer.log_probs) for answer in group),
        )

    def _note_passes(self, computed: Sequence[tuple[PackIndices, torch.Tensor]]) -> None:
        """Measure what the passes of a step have computed, and keep it for the next iteration."""
        assert self.step
        if not computed:
            return
        log_probs = torch.cat([log_probs[0] for _, log_probs in computed]).cpu().numpy()
        start = 0
        for indices, of_pack in computed:
            own, start = log_probs[start : start + of_pack.shape[1]], start + of_pack.shape[1]
            if indices.micro_batch.pack.is_filler:
                continue
            sums = self.step.measure(indices, own, self.options.clip)
            self._add(**dict(zip(MEASURES, sums.tolist(), strict=True)))
            if self.options.iterations > 1:
                self.step.keep(indices, own)

    def log(self, logs: dict[str, float], *args: Any, **others: Any) -> None:
        """Log as Trainer does, with what the steps since the line before have drawn and learned."""
        if "loss" in logs and self._sums["steps"]:
            if self._sums["questions"] and not self._sums["mixed"] and not self._teaches_nothing:
                self._teaches_nothing = True
                asked = count(int(self._sums["questions"]), "question")
                self.startup.notify(
                    f"step {self.state.global_step:,}: none of the last {asked} got answers that differ in reward, so "
                    "nothing was learned from them"
                )
            logs.update(self._means())
            if self.show:
                some = zip(*(column[:SHOWN] for column in self._kept), strict=True)
                self.show(self.state.global_step, [(self._stream.at(position)[0], group) for position, group in some])
        super().log(logs, *args, **others)

    def _means(self) -> dict[str, float]:
        sums, self._sums = self._sums, defaultdict(float)
        of_ranks = torch.tensor([sums[name] for name in MEASURES], dtype=torch.float64)
        weight, kl, clipped, first, distance = (
            self._add_up(of_ranks) if self.args.world_size > 1 else of_ranks
        ).tolist()
        each = {"clipped_share": _mean(clipped, weight)}
        if first:  # else no step has drawn
            each["log_prob_distance"] = _mean(distance, first)
        if sums["questions"]:  # else all steps had the answers of earlier ones
            drawn = {
                "reward": _mean(sums["reward"], sums["questions"]),
                "reward_spread": _mean(sums["spread"], sums["questions"]),
                "mixed_share": _mean(sums["mixed"], sums["questions"]),
                "questions_drawn": sums["questions"],
                "entropy": -_mean(sums["log_prob"], sums["tokens"]),
                "answer_tokens": _mean(sums["tokens"], sums["answers"]),
                "cut_share": _mean(sums["cut"], sums["answers"]),
            }
            each = drawn | each
        if self.options.kl:
            each["kl"] = _mean(kl, weight)
        for name in ("sampling_seconds", "rewarding_seconds", "training_seconds"):
            each[name] = sums[name]
        return {name: float(f"{value:.6g}") for name, value in each.items()}

    # Checkpoints.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as `PackTrainer` does, with the place in the stream of questions."""
        states: Any = self.state.stateful_callbacks
        tokens, sums = self.draw.tokens_per_batch, {name: float(value) for name, value in self._sums.items()}
        ended = self.evaluations.ended_early
        states[REWARDS] = {"position": self._position, "tokens_per_batch": tokens, "sums": sums, "ended": ended}
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save as `PackTrainer` does, and the answers that the next step has too."""
        if self.state.global_step % self.options.iterations and self.step:
            old, reference = (
                self._of_all([getattr(answer, name) for answer in self.step.answers]) for name in ("old", "reference")
            )
            kept = _Kept(
                positions=self._kept[0],
                drawn=[[*group] for group in self._kept[1]],
                old=old,
                reference=reference if self.options.kl else None,
            )
            if self.args.should_save:
                write_json(Path(output_dir) / ANSWERS, kept.model_dump())
        super()._save_rng_state(output_dir)

    def _of_all(self, log_probs: Sequence[np.ndarray]) -> list[list[float]]:
        """The log-probabilities that any rank knows."""
        flat = torch.from_numpy(np.concatenate(log_probs) if log_probs else np.zeros(0, np.float32))
        if self.args.world_size > 1:
            gathered = self.accelerator.gather(flat.to(self.args.device)[None]).cpu()
            flat = torch.stack([row.nan_to_num(0) for row in gathered]).sum(0) / (~gathered.isnan()).sum(0)
        ends = np.cumsum([len(each) for each in log_probs])
        return [part.tolist() for part in np.split(flat.numpy(), ends[:-1])] if len(ends) else []

    def _continue_losses(self) -> None:
        """Continue as `PackTrainer` does, with the questions and the answers of the checkpoint."""
        super()._continue_losses()
        state: Any = self.state
        self.step = None
        if kept := state.stateful_callbacks.get(REWARDS):
            self._position, self.draw.tokens_per_batch = kept["position"], kept["tokens_per_batch"]
            self._sums = defaultdict(float, kept["sums"])
            self.evaluations.ended_early = kept.get("ended", "")
        if state.global_step % self.options.iterations:
            checkpoint = Path(str(self.args.output_dir)) / f"checkpoint-{state.global_step}"
            answers = read_form(checkpoint / ANSWERS, _Kept, AGAIN)
            step = self._take(answers.positions, [*answers.drawn])
            for name, values in (("old", answers.old), ("reference", answers.reference)):
                for answer, known in zip(step.answers, values or (), strict=bool(values)):
                    getattr(answer, name)[:] = known


def seed_of(seed: int, step: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}, step {step}".encode(), digest_size=8).digest(), "little")


def _mean(total: float, num: float) -> float:
    return total / num if num else 0.0
