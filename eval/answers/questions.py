"""The questions of an evaluation: in dialogues, in stages, as the baselines are asked them, in batches; and their rows.

With `eval.turns: predicted` the questions of a record are one dialogue, and each follows the model's answers; with
`reference` each is a dialogue of its own, after the record's answers. Later stages show an answer as text, of which the
tokenizer makes tokens again. Prompts follow from the answers before, so a resumed evaluation asks the same ones.

Baselines are asked the run's own questions, without the adapter or with other images. Each has an engine of its own,
because an engine keeps recorded passes, which are with or without the adapter.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from tqdm import tqdm

from lookonce.datasets.balance import Majority
from lookonce.datasets.context import NOT_ANSWERED, as_shown, with_context
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Context, Record, Turn
from lookonce.errors import RecordsError, RunFolderError, UsageError
from lookonce.eval.answers.engines import Engine, engine_of
from lookonce.eval.answers.files import Answered, AnsweringCost, is_begun
from lookonce.eval.decoding.dialogue import Answer, Dialogue, is_shown
from lookonce.eval.scores.metrics import BASELINES, IN_CONTEXT, Baseline, Evaluation
from lookonce.eval.scores.prediction import Prediction, label, read_predictions, training_answers, write_predictions
from lookonce.files import hash_file, write_json
from lookonce.run.folder import Environment
from lookonce.run.open import OpenRun
from lookonce.train.data.tokenize import Example
from lookonce.train.model.frozen import model_settings

Question = tuple[Record, int]
"""A record, and the number of the turn that is asked."""
Turns = Literal["predicted", "reference"]
"""Which answers the earlier turns of a prompt have: the model's, or the record's."""


def dialogue_numbers(questions: Sequence[Question], turns: Turns) -> list[list[int]]:
    """The numbers of the questions of each dialogue; the questions of a record must follow one another."""
    numbers: list[list[int]] = []
    for number, (record, turn) in enumerate(questions):
        before = questions[number - 1] if number and turns == "predicted" else (None, 0)
        if before[0] is record and before[1] == turn - 1:
            numbers[-1].append(number)
        else:
            numbers.append([number])
    return numbers


def without_answers(questions: Sequence[Question], numbers: Sequence[Sequence[int]]) -> list[Question]:
    """The questions with `NOT_ANSWERED` for the answers that the model gives before them."""
    bare = [*questions]
    for group in numbers:
        record, first = questions[group[0]]
        if len(group) > 1:
            unanswered = (Turn(turn.question, NOT_ANSWERED) for turn in record.turns[first:])
            record = replace(record, turns=(*record.turns[:first], *unanswered))
        for number in group:
            bare[number] = (record, questions[number][1])
    return bare


def turns_before(
    questions: Sequence[Question],
    numbers: Iterable[Sequence[int]],
    answers: Mapping[int, Answer],
    special: Iterable[int],
) -> dict[int, tuple[Turn, ...]]:
    """The turns before each question in its prompt.

    `numbers` are those of the questions of some dialogues, and `special` the token ids of no shown answer.
    """
    never = {*special}
    turns_of: dict[int, tuple[Turn, ...]] = {}
    for group in numbers:
        record, first = questions[group[0]]
        turns = record.turns[:first]
        for number in group:
            turns_of[number], answer = turns, answers[number]
            text = answer.text if is_shown(answer, never) else NOT_ANSWERED
            turns += (Turn(record.turns[len(turns)].question, text),)
    return turns_of


Staged = Literal["predicted", "reference", "none"]
"""Which answers to earlier questions prompts have (`eval.staged`)."""


def questions_of(opened: OpenRun, records: Iterable[Record], staged: Staged) -> list[Question]:
    """The questions of some records, with reference answers as context if `staged` asks for them, else without any."""
    records = [replace(record, context=None) if record.context else record for record in records]
    if staged == "reference" and (form := opened.run.data.context):
        records = with_context(records, form, opened.images.keys_of)
    return [(record, number) for record in records for number in range(len(record.turns))]


def stages_of(opened: OpenRun, questions: Sequence[Question], staged: Staged) -> list[list[int]]:
    """The numbers of the questions answered together: those of a stage if contexts have predicted answers, or all.

    Questions that are in no stage are asked with the first.
    """
    form = opened.run.data.context
    if form is None or staged != "predicted":
        return [[*range(len(questions))]]
    numbers_of: dict[int, list[int]] = {}
    for number, (record, _) in enumerate(questions):
        numbers_of.setdefault(form.stage_of(record) or 0, []).append(number)
    return [numbers_of[stage] for stage in sorted(numbers_of)]


def in_context(
    opened: OpenRun, questions: Sequence[Question], numbers: Iterable[int], answers: Mapping[int, Answer]
) -> list[Question]:
    """Some questions by their numbers, with the answers to all questions of earlier stages as context."""
    form = opened.run.data.context
    assert form, "without `data.context` no question waits for the answers to others"
    chosen = [*numbers]
    records: dict[int, Record] = {}
    turns_of: dict[int, list[Turn]] = {}
    for number in sorted({*answers, *chosen}):
        record, turn = questions[number]
        records[id(record)] = record
        answered = Turn(record.turns[turn].question, _shown(opened, answers.get(number)))
        turns_of.setdefault(id(record), []).append(answered)
    changed = with_context([*records.values()], form, opened.images.keys_of, lambda record: turns_of[id(record)])
    with_id = dict(zip(records, changed, strict=True))
    return [(with_id[id(questions[number][0])], questions[number][1]) for number in chosen]


def _shown(opened: OpenRun, answer: Answer | None) -> str:
    """An answer as later prompts have it; one that spells a special token could begin a message there."""
    if answer is None or any(token in answer.text for token in opened.chat_tokenizer.special_tokens):
        return NOT_ANSWERED
    return as_shown(answer.text, answer.ended)


def row_of(
    record: Record, turn: int, image_keys: Sequence[str], answer: Answer | Prediction | None = None
) -> Prediction:
    """The row of a question and its answer, or that of another row, without majority answers and earlier turns."""
    labels: dict[str, Any] = {name: label(record.metadata.get(name)) for name in ("source", "category", "stage")}
    figures: dict[str, Any] = {name: getattr(answer, name, None) for name in ("logprob", "num_tokens", "ended")}
    return Prediction(
        origin=record.origin,
        images=tuple(map(str, record.images)),
        question=record.turns[turn].question,
        answer=record.turns[turn].answer,
        predicted=answer.text if answer else "",
        majority="",
        references=record.references,
        image_keys=tuple(image_keys),
        turn=turn,
        system=record.system,
        **labels | figures,
    )


NOT_OF_ANSWERS = {"split", "staged", "every", "max_questions", "metric"}
"""Keys of `eval` that answers do not depend on, or that their identity has in another form."""


@dataclass(frozen=True)
class Questions:
    opened: OpenRun
    split: str
    record_turns: Sequence[Question] = ()
    """Record and turn of each question."""
    numbers: Sequence[Sequence[int]] = ()
    """The numbers of the questions of each dialogue."""
    examples: Sequence[Example] = ()
    """The prompt of each question; in those of later questions of a dialogue the answers are `NOT_ANSWERED`."""
    dialogues: Sequence[Dialogue] = ()
    staged: Staged = "none"
    """Which answers the contexts have; predicted ones are not in these prompts, but in those of each stage."""
    baseline: Baseline | None = None
    """The baseline that is asked them; None for the run itself."""
    stage: int = 0
    """The number of the stage that they are, from 0."""

    @classmethod
    def of(cls, opened: OpenRun, split: str, staged: Staged | None = None) -> Questions:
        """All questions of a split, with contexts as `staged` or `eval.staged`; raises UsageError if there are none."""
        records, run = opened.records.get(split), opened.run
        if records is None:
            raise UsageError("the run has no held-out records: `data.held_out` leaves no training record out")
        if not records:
            raise UsageError(f"the run file names no records for `data.{split}`; add them or choose another --split")
        staged = (staged or run.eval.staged) if run.data.context else "none"
        return cls(opened, split, staged=staged).asking(questions_of(opened, records, staged))

    def asking(self, questions: Sequence[Question], stage: int = 0) -> Questions:
        """The same with other questions, of which the prompts are made."""
        numbers = dialogue_numbers(questions, self.opened.run.eval.turns)
        examples = self.opened.prompts(without_answers(questions, numbers))
        chat = self.opened.chat_tokenizer
        dialogues = [Dialogue.of([examples[number] for number in group], chat) for group in numbers]
        return replace(
            self, record_turns=questions, numbers=numbers, examples=examples, dialogues=dialogues, stage=stage
        )

    @cached_property
    def engine(self) -> Engine:
        """What answers them. Each stage and each baseline has a new one, which has answered nothing before."""
        return engine_of(self.opened)

    @cached_property
    def planned(self) -> list[list[int]]:
        """The numbers of the dialogues that are answered together."""
        return self.engine.plan(self.dialogues)

    @property
    def stages(self) -> list[list[int]]:
        """The numbers of the questions of each stage; all are one unless contexts have predicted answers."""
        return stages_of(self.opened, self.record_turns, self.staged)

    def at_stage(self, stage: int, answers: Mapping[int, Answer]) -> Questions:
        """The questions of a stage, with the answers to those of earlier stages."""
        stages = self.stages
        if len(stages) == 1:
            return self
        return self.asking(in_context(self.opened, self.record_turns, stages[stage], answers), stage)

    def after_all(self, answers: Mapping[int, Answer]) -> Questions:
        """All questions with the prompts in which they were answered."""
        if self.staged != "predicted":
            return self
        return self.asking(in_context(self.opened, self.record_turns, range(len(self.record_turns)), answers))

    @cached_property
    def batches(self) -> list[list[int]]:
        """The numbers of the questions that are answered together."""
        return [[question for number in batch for question in self.numbers[number]] for batch in self.planned]

    @property
    def name(self) -> str:
        """The name of their files in the run folder; later stages have files of partial answers alone."""
        return self.name_of(self.baseline) + (f"-stage-{self.stage + 1}" if self.stage else "")

    def name_of(self, baseline: Baseline | None) -> str:
        """The name of a baseline's files: `test-untuned`."""
        return f"{self.split}-{baseline}" if baseline else self.split

    def num_in(self, batches: Iterable[int]) -> int:
        return sum(len(self.batches[number]) for number in batches)

    def answer(
        self, model: Any, batches: Sequence[int], *, shows_progress: bool = True
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Answer some batches with a model, which may have an adapter; yields each one's number and answers."""
        bar = partial(tqdm, desc="answer questions", unit="question", leave=False)
        with bar(total=self.num_in(batches), disable=None if shows_progress else True) as progress:
            chosen = [[self.dialogues[index] for index in self.planned[number]] for number in batches]
            streamed = self.engine.stream(model, chosen, self.opened.notify)
            for number, answers in zip(batches, streamed, strict=True):
                yield number, [answer for dialogue_answers in answers for answer in dialogue_answers]
                progress.update(len(self.batches[number]))

    def of_questions(self, answered: Answered) -> dict[int, Answer]:
        """The answers of all batches, by the number of their question."""
        batches = [zip(batch, answered[number], strict=True) for number, batch in enumerate(self.batches)]
        return {question: answer for batch in batches for question, answer in batch}

    def predictions(self, answers: Mapping[int, Answer]) -> list[Prediction]:
        """The answers to all questions, each in the row of its question, in order."""
        special = self.opened.chat_tokenizer.special_token_ids
        earlier = turns_before(self.record_turns, self.numbers, answers, special)
        numbers = range(len(answers))
        return self.rows(self.record_turns, [earlier[n] for n in numbers], [answers[n] for n in numbers])

    def predictions_from(self, before: Sequence[Prediction]) -> list[Prediction]:
        """Answers that were given before to these questions, with all else as it is in the records now."""
        record_turns = [
            (replace(record, context=Context(row.context) if row.context else None), turn)
            for (record, turn), row in zip(self.record_turns, before, strict=True)
        ]
        return self.rows(record_turns, [row.earlier for row in before], before)

    def rows(
        self, questions: Sequence[Question], earlier: Sequence[tuple[Turn, ...]], answers: Sequence[Answer | Prediction]
    ) -> list[Prediction]:
        """The rows of some questions with their answers, each with the turns before it in its prompt."""
        majority = Majority.of_records(self.opened.records["train"])
        return [
            replace(
                row_of(record, turn, example.image_keys, answer),
                majority=majority.answer(record.turns[turn].question),
                earlier=before,
                earlier_answers=self.opened.run.eval.turns if before else None,
                context=record.known,
                context_answers=None if self.staged == "none" or not record.known else self.staged,
            )
            for (record, turn), before, example, answer in zip(questions, earlier, self.examples, answers, strict=True)
        ]

    def save(self, predictions: list[Prediction]) -> Evaluation:
        """Score answers, the run's own beside those of its baselines that are known, and write both."""
        training, sizes = training_answers(self.opened.records["train"]), self.opened.images.size_of
        baselines, metric = None if self.baseline else self._known_baselines(), self.opened.run.eval.metric
        evaluation = Evaluation.of(predictions, training, sizes, baselines, metric)
        self.opened.owner.check()
        write_predictions(self.opened.folder.predictions(self.name), evaluation.predictions)
        write_json(self.opened.folder.metrics(self.name), evaluation.to_json())
        return evaluation

    def known_predictions(self) -> list[Prediction] | None:
        """The predictions of an evaluation that asked the same; None if there was none or its files are damaged."""
        folder = self.opened.folder
        path = folder.predictions(self.name)
        if not path.exists() or is_begun(path.parent, self.name):
            return None
        try:
            cost = AnsweringCost.read(folder.answering(self.name))
            before = read_predictions(path) if cost.identity == self.identity() else []
        except (RecordsError, RunFolderError):
            return None
        return self.predictions_from(before) if len(before) == len(self.record_turns) else None

    def _known_baselines(self) -> dict[Baseline, list[str]]:
        """The answers of the baselines to a run's own questions, as far as they are known."""
        known: dict[Baseline, list[str]] = {}
        for baseline in (*BASELINES, *IN_CONTEXT):
            if self.opened.folder.answering(self.name_of(baseline)).exists():
                rows = questions_for(self, baseline).known_predictions()
                known |= {} if rows is None else {baseline: [row.predicted for row in rows]}
        return known

    def identity(self) -> str:
        """The sha256 over what the answers depend on, but the machine: adapter, model, prompts, settings."""
        run, folder = self.opened.run, self.opened.folder
        inputs = folder.recorded_inputs()
        adapter = {path.name: hash_file(path) for path in sorted(folder.adapter.glob("adapter_*"))}
        if self.baseline == "untuned":
            adapter = {}
            inputs.pop("records", None)  # those of a training, which may not have begun
        settings: dict[str, Any] = {
            "baseline": self.baseline,
            "adapter": adapter,
            "inputs": inputs,
            "cache": self.opened.fingerprint.sha256,
            "eval": run.eval.model_dump(exclude=NOT_OF_ANSWERS),
            "model": model_settings(run),
        }
        if form := run.data.context:
            stages = [form.stage_of(record) for record, _ in self.record_turns]
            settings["context"] = [self.staged, form.model_dump(exclude={"answers"}), stages]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for example in self.examples:
            digest.update(repr((example.token_ids.tobytes(), example.image_keys)).encode())
        return digest.hexdigest()


def on_this_machine(identity: str) -> str:
    """An identity of answers with the same bits: libraries and hardware included."""
    return hashlib.sha256(json.dumps([identity, asdict(Environment.this())], sort_keys=True).encode()).hexdigest()


def questions_for(questions: Questions, baseline: Baseline | None) -> Questions:
    """A run's own questions as a baseline is asked; None is the run itself."""
    if baseline is None:
        return questions
    if baseline == "reference" or baseline == "none":
        return replace(Questions.of(questions.opened, questions.split, baseline), baseline=baseline)
    questions = replace(questions, baseline=baseline)
    if baseline != "shuffled":
        return questions
    records = {id(record): record for record, _ in questions.record_turns}
    shown = dict(zip(records, shuffle_images([*records.values()], questions.opened.images), strict=True))
    return questions.asking([(shown[id(record)], turn) for record, turn in questions.record_turns])


def why_not(questions: Questions, baseline: Baseline | None) -> str:
    """Why a baseline has no meaning for these questions; empty if it has one."""
    keys = {key for example in questions.examples for key in example.image_keys}
    if baseline in IN_CONTEXT and questions.opened.run.data.context is None:
        return "--reference-context and --no-context need `data.context` in the run file"
    if baseline in IN_CONTEXT and baseline == questions.staged:
        return f"`eval.staged` is {baseline}, so these are the answers of the run itself"
    if baseline == "shuffled" and len(keys) < 2:
        return f"--shuffle-images needs at least two distinct images, and these records have {len(keys)}"
    return ""


def shuffle_images(records: Sequence[Record], images: ImageIndex) -> list[Record]:
    """The records with every image replaced by another one: a model that uses the images must score lower."""
    keys = sorted({images.key_of[image] for record in records for image in record.images})
    random.Random(0).shuffle(keys)
    other = {key: images.path_of[after] for key, after in zip(keys, keys[1:] + keys[:1], strict=True)}
    return [replace(record, images=tuple(other[images.key_of[path]] for path in record.images)) for record in records]
