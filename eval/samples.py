"""Answer each question of a split several times: what the samples score, and whether training by rewards could learn.

Samples are an evaluation like another: batches of questions, shared by the ranks, each on disk when it is answered. The
files have a folder of their own, `samples`, because nothing else reads them as a run's answers, and hold the samples of
the last call. Whatever follows a sampled answer would be sampled again for each of them, so conversations and stages
that follow predicted answers are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from lookonce.errors import UsageError
from lookonce.eval.answers.engines import Engine, SharedPrefixes
from lookonce.eval.answers.files import Answered, AnsweringCost, PartialAnswers
from lookonce.eval.answers.questions import Questions, on_this_machine, questions_for, row_of, why_not
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.decoding.sampling import Sampling
from lookonce.eval.run import answered_batches, model_of, opened_questions
from lookonce.eval.scores.metric import OF_ALL, working_scorer
from lookonce.eval.scores.metrics import Baseline
from lookonce.eval.scores.samples import SampledQuestion, SampleScores, most_given
from lookonce.files import write_json, write_text
from lookonce.text import Notify, quiet
from lookonce.train.loop.distributed import Ranks
from lookonce.train.loop.session import compile_cache


@dataclass(frozen=True)
class SampledQuestions(Questions):
    sampling: Sampling = Sampling(1)
    seed: int = 0

    @cached_property
    def engine(self) -> Engine:
        return SharedPrefixes(self.opened, self.sampling, seed=self.seed)

    def identity(self) -> str:
        settings = [super().identity(), asdict(self.sampling), self.seed]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def samples_of(self, answered: Answered) -> dict[int, Sequence[Answer]]:
        """The samples of all questions, by the number of the question."""
        num = self.sampling.num_samples
        return {
            question: answered[number][place * num : (place + 1) * num]
            for number, batch in enumerate(self.batches)
            for place, question in enumerate(batch)
        }


def sample_run(
    run_dir: Path,
    sampling: Sampling,
    split: str | None = None,
    baseline: Baseline | None = None,
    *,
    seed: int = 0,
    assignments: Sequence[str] = (),
    verify_images: bool = False,
    notify: Notify = quiet,
) -> tuple[SampleScores, Path] | None:
    """Sample the answers to a split; returns the scores and the path of the samples.

    The arguments are those of `evaluate_run`, and under torchrun all ranks but the first return None.

    Raises:
        LookonceError: as by `evaluate_run`; or questions follow predicted answers, or the engine is `generate`.
    """
    ranks, named = Ranks.join(), (baseline,) if baseline else ()
    with opened_questions(run_dir, split, named, ranks, assignments, verify_images, notify) as questions:
        if baseline and (reason := why_not(questions, baseline)):
            raise UsageError(reason)
        chosen = questions_for(questions, baseline)
        _check(chosen)
        longest = sampling.max_new_tokens or questions.opened.run.eval.max_new_tokens
        sampling = replace(sampling, max_new_tokens=longest)
        columns = {field.name: getattr(chosen, field.name) for field in fields(Questions)}
        sampled = SampledQuestions(**columns, sampling=sampling, seed=seed)
        return _sample(sampled, partial(model_of(questions.opened, is_shared=False), baseline), ranks)


def _check(questions: Questions) -> None:
    """Refuse what samples cannot be drawn or scored of."""
    metric = questions.opened.run.eval.metric
    if metric in OF_ALL:
        raise UsageError(
            f"--samples scores each answer by itself, and `eval.metric: {metric}` is of all together; add "
            "--set eval.metric=rougeL, or another metric of single answers"
        )
    asked = zip(questions.record_turns, questions.examples, strict=True)
    working_scorer([row_of(*question, example.image_keys) for question, example in asked], metric)
    if questions.opened.run.eval.engine == "generate":
        raise UsageError("--samples needs `eval.engine: shared`; add --set eval.engine=shared")
    if any(dialogue.later for dialogue in questions.dialogues):
        raise UsageError(
            "--samples asks each question by itself, and here later turns follow predicted answers; add "
            "--set eval.turns=reference"
        )
    if len(questions.stages) > 1:
        raise UsageError(
            "--samples asks each question by itself, and here later stages follow predicted answers; add "
            "--reference-context or --no-context"
        )


def _sample(
    questions: SampledQuestions, open_model: Callable[[], AbstractContextManager[Any]], ranks: Ranks
) -> tuple[SampleScores, Path] | None:
    opened, once = questions.opened, ranks.first_decides
    path = opened.folder.samples(questions.name)
    identity = once(lambda: on_this_machine(questions.identity()))
    unfinished = PartialAnswers(path.parent, questions.name, identity, ranks.rank)
    with ExitStack() as stack, compile_cache(opened, opened.notify).in_use():
        model = cache(lambda: stack.enter_context(open_model()))
        answered = answered_batches(questions, unfinished, AnsweringCost(), model, ranks)
    if not ranks.is_first:
        return None
    samples = questions.samples_of(answered)
    predictions = questions.predictions({number: most_given(given) for number, given in samples.items()})
    rows = [SampledQuestion(row, tuple(samples[number])) for number, row in enumerate(predictions)]
    scores = SampleScores.of(rows, questions.sampling, questions.seed, opened.run.eval.metric)
    opened.owner.check()
    write_text(path, "".join(f"{json.dumps(row.to_json(), ensure_ascii=False)}\n" for row in rows))
    write_json(path.with_suffix(".json"), scores.to_json())
    unfinished.remove()
    return scores, path
