"""Measure how fast questions are answered: shared prefixes beside `generate`, and beside what limits both.

    python benchmarks/answers.py --model 8b --images 64 --set eval.max_new_tokens=8
    python benchmarks/answers.py --run run.yaml --split test --engines shared

With `--run`, the questions of a split of a run file; with `--model`, synthetic ones and a model of this size with
random weights, which are written to `bench` and kept. The first engine is the baseline.

Design: each engine runs its whole path, from records to a file of answers: tokenizing, reading features, computing,
detokenizing, writing. Its first batch is timed apart, since it compiles and captures. Two limits are measured beside
them: the prompts alone, which are the forward pass over the packs of training, and reading the weights once for each
token of a batch. Random weights seldom give an end token, so nearly all answers have the largest number of tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lookonce.bench.step import make_run, synchronize
from lookonce.datasets.records import Record
from lookonce.environment import best_device, device_name
from lookonce.eval.answers.engines import Engine, Generate, SharedPrefixes
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding.dialogue import Answer, Dialogue
from lookonce.run.config import read_run_file
from lookonce.run.open import TO_BUILD, TO_MEASURE, OpenRun, open_run
from lookonce.text import Notify, count, duration, quiet, table
from lookonce.train.model.load import add_lora, load_trained, load_untuned, text_model

ENGINES: dict[str, Callable[[OpenRun], Engine]] = {
    "generate": Generate,
    "shared": partial(SharedPrefixes, min_compiled=0),  # few questions stand for many
}
COPIED = 1 << 30
"""Bytes that are copied to measure how fast memory is; a sixteenth of it on a CPU."""


@dataclass(frozen=True)
class Answering:
    """How fast an engine answered."""

    engine: str
    num_questions: int
    num_batches: int
    seconds: float
    warm_up_seconds: float
    """Time of the first batch, which was answered once before."""
    peak_gb: float | None

    @property
    def ms_per_question(self) -> float:
        return 1e3 * self.seconds / self.num_questions


@dataclass(frozen=True)
class AnswersReport:
    """All engines that were measured, and their limits."""

    device: str
    num_images: int
    max_new_tokens: int
    measured: list[Answering]
    prompts_ms: float | None = None
    """Milliseconds a question of the prompts alone, in packs."""
    weights_ms: float | None = None
    """Milliseconds a question of reading the weights once for each token of each batch."""
    same_answers: float | None = None
    """Share of the questions to which the engines gave the same tokens."""

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["measured"] = [asdict(one) | {"ms_per_question": one.ms_per_question} for one in self.measured]
        return value

    def text(self) -> str:
        header = ("", "questions", "ms/question", "", "first batch", "peak GB")
        lines = [self._row(one) for one in self.measured]
        limits = (("prompts alone", self.prompts_ms), ("weights alone", self.weights_ms))
        lines += [(name, "", f"{ms:.2f}", "", "", "") for name, ms in limits if ms is not None]
        notes = [f"  {self.device}; {count(self.num_images, 'image')}, {self.max_new_tokens} new tokens"]
        if self.same_answers is not None:
            notes.append(f"  the same tokens in {self.same_answers:.1%} of the answers")
        return "\n".join([table(header, lines), *notes])

    def _row(self, one: Answering) -> tuple[str, ...]:
        factor = self.measured[0].ms_per_question / one.ms_per_question
        peak = "-" if one.peak_gb is None else f"{one.peak_gb:.1f}"
        warm_up = duration(one.warm_up_seconds)
        return one.engine, f"{one.num_questions:,}", f"{one.ms_per_question:.2f}", f"{factor:.1f}x", warm_up, peak


def bench_answers(
    opened: OpenRun, records: Sequence[Record], engines: Sequence[str], notify: Notify = quiet
) -> Iterator[AnswersReport]:
    """Answer all questions of some records with each engine; yields the report of all so far after each.

    The model has the adapter of the run folder if it was trained, and otherwise a new one.
    """
    model, run = _load(opened), opened.run
    num_images = len({path for record in records for path in record.images})
    given: list[list[Answer]] = []
    report = AnswersReport(device_name(), num_images, run.eval.max_new_tokens, [])
    for name in engines:
        engine = ENGINES[name](opened)
        measured, answers = _measure(name, engine, opened, model, records)
        notify(f"{name}: {measured.ms_per_question:.2f} ms a question")
        given.append(answers)
        same = [len({one.token_ids for one in answers}) == 1 for answers in zip(*given, strict=True)]
        report = AnswersReport(
            report.device,
            num_images,
            run.eval.max_new_tokens,
            [*report.measured, measured],
            *(
                _limits(engine, opened, model, records)
                if isinstance(engine, SharedPrefixes)
                else (report.prompts_ms, report.weights_ms)
            ),
            same_answers=sum(same) / len(same) if len(given) > 1 else None,
        )
        yield report


def _load(opened: OpenRun) -> Any:
    run, adapter, model_folder = opened.run, opened.folder.adapter, opened.model_folder
    if (adapter / "adapter_config.json").exists():
        return load_trained(model_folder, run, adapter)
    model = add_lora(load_untuned(model_folder, run), model_folder, run.lora, seed=0)
    return model.to(best_device()).eval()


def _questions(opened: OpenRun, records: Sequence[Record]) -> Questions:
    asked = [(record, turn) for record in records for turn in range(len(record.turns))]
    return Questions(opened, "train").asking(asked)


def _chosen(questions: Questions, batches: Sequence[Sequence[int]]) -> list[list[Dialogue]]:
    return [[questions.dialogues[number] for number in batch] for batch in batches]


def _measure(
    name: str, engine: Engine, opened: OpenRun, model: Any, records: Sequence[Record]
) -> tuple[Answering, list[Answer]]:
    """Answer everything, after the first batch once to warm up."""
    questions = _questions(opened, records)
    batches = engine.plan(questions.dialogues)
    warm_up = _seconds(lambda: [*engine.stream(model, _chosen(questions, batches[:1]))])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    answers: dict[int, Answer] = {}
    seconds = _seconds(lambda: answers.update(_whole_path(engine, opened, model, records)))
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    measured = Answering(name, len(questions.record_turns), len(batches), seconds, warm_up, peak)
    return measured, [answers[number] for number in sorted(answers)]


def _whole_path(engine: Engine, opened: OpenRun, model: Any, records: Sequence[Record]) -> dict[int, Answer]:
    """From records to a file of answers."""
    questions = _questions(opened, records)
    answers: dict[int, Answer] = {}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "answers.jsonl").open("w") as file:
        batches = engine.plan(questions.dialogues)
        for batch, found in zip(batches, engine.stream(model, _chosen(questions, batches)), strict=True):
            for number, some in zip(batch, found, strict=True):
                file.writelines(f"{json.dumps(asdict(answer))}\n" for answer in some)
                answers |= zip(questions.numbers[number], some, strict=True)
    return answers


def _limits(engine: SharedPrefixes, opened: OpenRun, model: Any, records: Sequence[Record]) -> tuple[float, float]:
    """Milliseconds a question: of the prompts alone, and of reading the weights once for each token of each batch."""
    questions = _questions(opened, records)
    batches = [[one.first for one in batch] for batch in _chosen(questions, engine.plan(questions.dialogues))]
    decoder, num_questions = engine.decoder_of(model), len(questions.record_turns)
    prompts = _seconds(lambda: [branches.token for _, branches, _ in decoder.begun(batches)])
    num_bytes = sum(weight.nbytes for weight in text_model(model).parameters())
    reads = num_bytes * len(batches) * engine.room.max_new_tokens / _bytes_per_second()
    return 1e3 * prompts / num_questions, 1e3 * reads / num_questions


def _bytes_per_second() -> float:
    """How fast memory is read: a copy reads and writes."""
    device = best_device()
    source = torch.zeros(COPIED if device.type == "cuda" else COPIED // 16, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / min(_seconds(lambda: target.copy_(source)) for _ in range(5))


def _seconds(function: Callable[[], object]) -> float:
    synchronize(best_device())
    start = time.perf_counter()
    function()
    synchronize(best_device())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--run", type=Path)
    chosen.add_argument("--model")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--split", default="train")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--set", action="append", default=[], dest="assignments")
    given = parser.parse_args()
    if given.model:
        run = make_run(Path("bench"), given.model, given.images, given.tokenizer, given.assignments)
        open_run(run, TO_BUILD).build()
    else:
        run = read_run_file(given.run, given.assignments)
    with open_run(run, TO_MEASURE) as opened:
        for report in bench_answers(opened, opened.records[given.split], given.engines, print):
            print(report.text(), json.dumps(report.to_json()), sep="\n")


if __name__ == "__main__":
    main()
