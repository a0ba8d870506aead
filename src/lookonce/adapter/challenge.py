"""What a repository on the Hub needs besides an adapter to be a submission to a challenge.

Design: the organisers' tool (the package medvqa, 0.15.7) downloads two files for task 1, submission_task1.py and
requirements.txt, and runs the script in a folder with nothing else. So the script loads the model and the published
adapter by their names, with transformers and PEFT alone, and has all that answers depend on as constants. For the
private evaluation the tool replaces lines that load the rows; the template has them letter for letter.

Task 2 of Medico asks for explained answers to the 1,500 rows that `lookonce data prepare` writes. An explanation is
what the model answers to further questions about the image, asked once about each image. The confidence is the
geometric mean of the probabilities of the answer's tokens, so that long answers do not count as doubtful.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from lookonce.adapter.card import DTYPES, BaseModel, system_texts
from lookonce.errors import UsageError
from lookonce.eval.answerer import Answerer, ask_each, read_questions
from lookonce.eval.answers.questions import Question
from lookonce.eval.predict import Row, predict
from lookonce.eval.submission import RULES, Challenge, SubmissionInfo
from lookonce.hub import is_hub_name
from lookonce.run.config import RunFile
from lookonce.text import Notify, count, listed, quiet
from lookonce.train.model.frozen import QUANTISED, frozen_of_answers

FILES = {
    1: ("submission_task1.py", "requirements.txt"),
    2: ("submission_task2.py", "submission_task2.jsonl"),
}
TEMPLATE = Path(__file__).with_name("submission_task1.py.jinja")
PINNED = ("transformers", "peft")
NEEDED = ("accelerate", "datasets>=3.4.1", "evaluate", "nltk", "pillow", "rouge_score", "torch", "tqdm")
NUM_ROWS = 1500
"""The number of rows of Medico's task 2."""
PROBES = (
    "What abnormalities or findings are visible in the image?",
    "Where in the image is the finding located?",
    "What are the size, shape and color of the finding?",
)
"""The questions whose answers explain, by default."""
SENTENCE_ENDS = (".", "!", "?")
NUM_NAMED = 3


def the_system_text(run: RunFile) -> str | None:
    """The system text of the run's prompts, or None; raises UsageError if there are several, or contexts."""
    if run.data.context:
        raise UsageError(
            "the run's prompts have answers to earlier questions (data.context), and a challenge asks one question a "
            "row; export a run without data.context"
        )
    if run.data.system:
        return run.data.system
    texts = system_texts(run)
    if texts is None:
        raise UsageError(
            "the training records cannot be read any more, so the system text of the prompts is not known; make "
            f"{listed([str(path) for path in run.data.train])} readable again"
        )
    if len(texts) > 1:
        raise UsageError(
            f"the training records have {len(texts)} different system texts, and a challenge's rows have none; export "
            "a run whose records have one, or none"
        )
    return texts[0] if texts else None


def task1_files(
    run: RunFile, base: BaseModel, repository: str, challenge: Challenge, info: SubmissionInfo
) -> dict[str, str]:
    """The files of task 1, by name; raises UsageError if a name is malformed, or no script can answer like the run."""
    if not is_hub_name(repository):
        raise UsageError(f"--repo-id {repository!r} is not the name of a repository on the Hub; write OWNER/NAME")
    rules, quantised = RULES[challenge], QUANTISED.get(frozen_of_answers(run))
    limits = {"shortest_edge": run.cache.min_pixels, "longest_edge": run.cache.max_pixels}
    thinking = run.data.enable_thinking
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    script = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        repository=repository,
        title=rules.title,
        medico=challenge == "medico",
        info=_as_python(info),
        base={"pretrained_model_name_or_path": base.name} | ({"revision": base.commit} if base.commit else {}),
        backend=run.cache.backend,
        system=the_system_text(run),
        template={} if thinking is None else {"enable_thinking": thinking},
        pixels={limit: number for limit, number in limits.items() if number},
        dtype=DTYPES[run.train.precision],
        attention="eager" if run.model.attention == "eager" else "sdpa",
        quantised=quantised,
        modules_to_save=run.lora.modules_to_save,
        max_new_tokens=run.eval.max_new_tokens,
        strips=rules.strips_answers,
        digits=rules.digits,
        repr=repr,
    )
    needed = {*(f"{name}=={version(name)}" for name in PINNED), *NEEDED}
    needed |= {"bitsandbytes"} if quantised else set()
    needed |= {"torchvision"} if run.cache.backend == "torchvision" else set()
    return {"submission_task1.py": script, "requirements.txt": "\n".join(sorted(needed)) + "\n"}


def _as_python(info: SubmissionInfo) -> str:
    """The submission info as source code, of texts and lists of texts."""
    return json.dumps(info.model_dump(), indent=4, ensure_ascii=False)


def task2_files(
    answerer: Answerer, records: Path, probes: Sequence[str], info: SubmissionInfo, notify: Notify = quiet
) -> dict[str, str]:
    """The files of Medico's task 2, by their names, with an explained answer to each question of a records file.

    Raises:
        UsageError: the records are not the rows of task 2, or a row has no answer or no explanation.
    """
    system = the_system_text(answerer.opened.run)
    questions = [(replace(record, system=system), turn) for record, turn in _task2_questions(records)]
    images = dict.fromkeys(record.images for record, _ in questions)
    further = ask_each(images, probes, system)
    report = predict(answerer, [*questions, *further], notify=notify)
    if report.skipped:
        reason, locations = next(iter(report.skipped.items()))
        raise UsageError(
            f"{count(report.num_skipped, 'question')} cannot be answered; the first, {locations[0]}: {reason}"
        )
    if cut := sum(row["ended"] == "length" for row in report.rows):
        notify(f"{count(cut, 'answer')} cut off at eval.max_new_tokens: {answerer.opened.run.eval.max_new_tokens}")
    answers = iter(report.rows[len(questions) :])
    explained = {image: _explanation([next(answers) for _ in probes]) for image in images}
    rows = [
        _task2_row(number, question, row, explained[question[0].images])
        for number, (question, row) in enumerate(zip(questions, report.rows, strict=False))
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return {"submission_task2.jsonl": lines, "submission_task2.py": f"SUBMISSION_INFO = {_as_python(info)}\n"}


def _task2_questions(records: Path) -> list[Question]:
    """The questions of the rows of task 2; raises UsageError if the records are others."""
    questions, broken = read_questions(records)
    write = "write the rows with: lookonce data prepare kvasir-vqa-x1 DIR, and name DIR/medico-task2.jsonl"
    if broken:
        raise UsageError(
            f"{count(len(broken), 'record')} of {records} cannot be read: {next(iter(broken.values()))}; {write}"
        )
    if len(questions) != NUM_ROWS:
        raise UsageError(
            f"task 2 has exactly {NUM_ROWS:,} rows, and {records} has {count(len(questions), 'question')}; {write}"
        )
    wrong = [
        record.origin
        for number, (record, turn) in enumerate(questions)
        if record.metadata.get("val_id") != number or len(record.images) != 1 or turn
    ]
    if wrong:
        raise UsageError(
            f"{count(len(wrong), 'record')} of {records} lack one image or their `val_id`, the row's number from 0: "
            f"{listed(wrong, NUM_NAMED)}; {write}"
        )
    return questions


def _explanation(rows: Sequence[Row]) -> str:
    """Answers to further questions as a text: sentences as they are, and other answers after their questions."""
    question_of: dict[str, str] = {}
    for row in rows:
        question_of.setdefault(row["predicted"].strip(), row["question"])
    question_of.pop("", None)
    return " ".join(
        text if text.endswith(SENTENCE_ENDS) else f"{question} {text}." for text, question in question_of.items()
    )


def _task2_row(number: int, question: Question, row: Row, explanation: str) -> dict[str, Any]:
    record, turn = question
    answer = row["predicted"].strip()
    if not answer or not explanation:
        raise UsageError(
            f"{record.origin}: the model gives no {'explanation' if answer else 'answer'}, which task 2 demands; "
            f"{'ask other questions with --explain' if answer else 'train it longer, or export another run'}"
        )
    confidence = math.exp(row["logprob"] / row["num_tokens"]) if "logprob" in row else None
    return {
        "val_id": number,
        "img_id": str(record.metadata.get("img_id") or record.images[0].stem),
        "question": record.turns[turn].question,
        "answer": answer,
        "textual_explanation": explanation,
    } | ({} if confidence is None else {"confidence_score": round(confidence, 4)})
