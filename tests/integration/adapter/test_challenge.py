"""What `lookonce export --repo` writes: the organisers' tool takes it, and its answers are those of `lookonce eval`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from support.challenge import ALL_ROWS, BASE, NAME, PRIVATE_GI_ROWS, PRIVATE_ROWS, replaced, run_script
from support.rows import run as invoke
from support.rows import write_lines

from lookonce.adapter import challenge as module
from lookonce.adapter.card import BaseModel
from lookonce.adapter.challenge import task1_files
from lookonce.datasets.records import Record, read_records
from lookonce.errors import UsageError
from lookonce.eval.answerer import Answerer
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.prediction import Prediction, read_predictions
from lookonce.eval.submission import SubmissionInfo
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import TO_BUILD, open_run
from lookonce.workflow import train


@pytest.fixture(scope="module")
def trained(make_run_in: Callable[..., RunFile], tmp_path_factory) -> RunFolder:
    """An evaluated run with varied answers, some with spaces around them, about images of fewer pixels than usual."""
    run = make_run_in(
        tmp_path_factory.mktemp("challenge"),
        cache={"max_pixels": 20_000},
        train={"steps": 6, "learning_rate": 0.01},
        lora={"modules_to_save": ["embed_tokens"]},
        eval={"max_new_tokens": 6},
    )
    open_run(run, TO_BUILD).build()
    train(run, notify=lambda note: None)
    evaluate_run(run.output, "val", notify=lambda note: None)
    return RunFolder(run.output)


@pytest.fixture(scope="module")
def expected(trained: RunFolder) -> list[Prediction]:
    rows = read_predictions(trained.predictions("val"))
    assert len({row.predicted for row in rows}) > 10, "answers differ"
    return rows


@pytest.fixture
def repo(trained: RunFolder, tmp_path: Path) -> Callable[..., Path]:
    """Writes a repository of the run, whose script finds model and adapter on this machine."""

    def write(challenge: str, *words: str | Path) -> Path:
        options = ("--repo", tmp_path / "repo", "--repo-id", NAME, "--base-model", BASE, *words)
        result = invoke("export", trained.folder, "--to", challenge, *options)
        assert result.exit_code == 0, result.output
        return tmp_path / "repo"

    return write


EVALUATIONS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "medico, all rows": ("medico", (ALL_ROWS,)),
    "medico, private rows": ("medico", PRIVATE_ROWS),
    "medvqa-gi, public rows": ("medvqa-gi", ()),
    "medvqa-gi, private rows": ("medvqa-gi", (PRIVATE_GI_ROWS,)),
}


@pytest.mark.guarantee(
    "An exported script gives the answers of `lookonce eval`, in float32, by stock transformers and PEFT."
)
@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_the_exported_script_answers_as_the_evaluation_did(
    evaluation, repo, expected, trained, sample, monkeypatch, tmp_path
):
    challenge, rules = EVALUATIONS[evaluation]
    code = replaced((repo(challenge) / "submission_task1.py").read_text(), *rules)
    rows = read_records(sample / "val.jsonl")
    written = run_script(code, rows, sample / "model", trained.adapter, monkeypatch, tmp_path)
    order = list(range(len(expected)))
    if evaluation == "medico, all rows":
        order = datasets.Dataset.from_dict({"n": order}).shuffle(seed=42)["n"]
    rows = [expected[number] for number in order]
    texts = [row.predicted.strip() if challenge == "medico" else row.predicted for row in rows]
    assert [row["answer"] for row in written["predictions"]] == texts
    assert [row["question"] for row in written["predictions"]] == [row.question for row in rows]
    assert [(row["index"], row["img_id"]) for row in written["predictions"]] == [
        (number, Path(row.images[0]).stem) for number, row in enumerate(rows)
    ]
    right = sum(text == row.answer for text, row in zip(texts, rows, strict=True))
    assert written["public_scores"]["meteor"] == round(right / len(rows), 4 if challenge == "medico" else 2)


def test_in_bfloat16_the_script_has_the_trained_weights_unrounded(trained, sample, monkeypatch, tmp_path):
    run = trained.read_run()
    run = run.model_copy(update={"train": run.train.model_copy(update={"precision": "bf16"})})
    script = task1_files(run, BaseModel(BASE, None, None), NAME, "medvqa-gi", SubmissionInfo())["submission_task1.py"]
    script += "\ntorch.save(dict(model.named_parameters()), 'weights.pt')\n"
    run_script(script, read_records(sample / "val.jsonl")[:3], sample / "model", trained.adapter, monkeypatch, tmp_path)
    weights = torch.load(tmp_path / "weights.pt")
    stored = load_file(trained.adapter / "adapter_model.safetensors")
    used = {re.sub(r"\.(modules_to_save\.)?default\b", "", name): weight for name, weight in weights.items()}
    assert len(stored) > 50 and all(torch.equal(used[name], weight) for name, weight in stored.items())
    assert {weight.dtype for name, weight in used.items() if name not in stored} == {torch.bfloat16}


def as_line(record: Record, **more: Any) -> dict[str, Any]:
    """A line of a records file that may lie anywhere."""
    [turn] = record.turns
    turns = [{"question": turn.question, "answer": turn.answer}]
    return {"images": [str(path) for path in record.images], "turns": turns, **more}


PROBES = ("How many polyps are in the image?", "Is there text?")


@pytest.fixture
def task2(sample: Path, tmp_path: Path, monkeypatch) -> Path:
    """The sample's validation rows as those of task 2, which then has as many."""
    records = read_records(sample / "val.jsonl")
    write_lines(tmp_path / "task2.jsonl", *(as_line(one, metadata={"val_id": n}) for n, one in enumerate(records)))
    monkeypatch.setattr(module, "NUM_ROWS", len(records))
    return tmp_path / "task2.jsonl"


@pytest.mark.guarantee("Explained answers of task 2 are those of `lookonce eval`, one for each row.")
def test_task_2_has_the_answers_of_the_evaluation_explained_by_answers_about_the_image(
    repo, task2, trained, expected, tmp_path, monkeypatch
):
    asked, real = [], module.predict
    monkeypatch.setattr(
        module,
        "predict",
        lambda answerer, questions, **more: asked.append(len(questions)) or real(answerer, questions, **more),
    )
    (tmp_path / "team.yaml").write_text("Team_Name: t\n")
    words = [word for probe in PROBES for word in ("--explain", probe)]
    folder = repo("medico", "--task2", task2, *words, "--info", tmp_path / "team.yaml")
    assert {path.name for path in folder.iterdir()} == {
        *("submission_task1.py", "requirements.txt", "submission_task2.py", "submission_task2.jsonl")
    }
    rows = [json.loads(line) for line in (folder / "submission_task2.jsonl").read_text().splitlines()]
    assert [row["val_id"] for row in rows] == list(range(len(expected)))
    images = [Path(row.images[0]).stem for row in expected]
    assert [(row["img_id"], row["question"]) for row in rows] == list(
        zip(images, (r.question for r in expected), strict=True)
    )
    assert [row["answer"] for row in rows] == [row.predicted.strip() for row in expected]
    mean = [math.exp(row.logprob / row.num_tokens) for row in expected]
    assert [row["confidence_score"] for row in rows] == pytest.approx(mean, abs=2e-4) and len(set(mean)) > 10
    assert asked == [len(expected) + len(set(images)) * len(PROBES)], "each image is asked once"
    answerer = Answerer.open(trained.folder)
    for number in (0, len(rows) - 1):
        said = [answerer.answer(expected[number].images[0], probe)[0].text.strip() for probe in PROBES]
        parts = [f"{probe} {text}." for probe, text in zip(PROBES, said, strict=True)]
        assert all(said) and said[0] != said[1] and rows[number]["textual_explanation"] == " ".join(parts)
    info: dict[str, Any] = {}
    exec((folder / "submission_task2.py").read_text(), info)
    assert info["SUBMISSION_INFO"]["Team_Name"] == "t" and set(info["SUBMISSION_INFO"]) == set(
        SubmissionInfo.model_fields
    )


def test_records_that_are_not_the_rows_of_task_2_are_refused(task2, sample, trained, tmp_path):
    lines = task2.read_text().splitlines(keepends=True)
    for text, message in {
        "".join(lines[:-1]): "task 2 has exactly 69 rows, and .* has 68 questions; write the rows with: lookonce data",
        "".join([lines[1], lines[0], *lines[2:]]): "2 records of .* lack one image or their `val_id`",
        "".join(["{}\n", *lines[1:]]): "1 record of .* cannot be read",
    }.items():
        task2.write_text(text)
        with pytest.raises(UsageError, match=message):
            module.task2_files(Answerer.open(trained.folder), task2, PROBES, SubmissionInfo())


def test_explanations_are_sentences_and_a_row_without_one_is_refused(task2):
    def explained(*answers: str) -> str:
        return module._explanation([{"predicted": text, "question": f"q{n}?"} for n, text in enumerate(answers)])

    assert explained("A polyp is seen.", " 5 mm ", "", "A polyp is seen.") == "A polyp is seen. q1? 5 mm."
    [question, *_] = module._task2_questions(task2)
    row = {"predicted": "yes", "num_tokens": 1}
    assert "confidence_score" not in module._task2_row(0, question, row, "because")
    for answer, explanation, message in (
        ("", "x", "no answer, .* train it longer"),
        ("x", "", "no explanation, .*--explain"),
    ):
        with pytest.raises(UsageError, match=message):
            module._task2_row(0, question, row | {"predicted": answer}, explanation)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"train": {"precision": "bf16", "frozen": "nf4"}},
            ["DTYPE = torch.bfloat16", "bnb_4bit_compute_dtype=DTYPE)", "'bnb_4bit_quant_type': 'nf4'"],
        ),
        ({"train": {"precision": "bf16", "frozen": "int8"}}, ["BitsAndBytesConfig(**{'load_in_8bit': True"]),
        ({"data": {"enable_thinking": False}}, ["TEMPLATE = {'enable_thinking': False}"]),
        ({"cache": {"backend": "torchvision"}}, ["Qwen2VLImageProcessor as ImageProcessor", "PIXELS = {}"]),
        ({"model": {"attention": "eager"}}, ["attn_implementation='eager'"]),
    ],
)
def test_settings_that_answers_depend_on_are_in_the_script(make_run, changes, lines):
    files = task1_files(make_run(**changes), BaseModel(BASE, "c" * 40, None), NAME, "medico", SubmissionInfo())
    script, needed = files["submission_task1.py"], files["requirements.txt"].splitlines()
    compile(script, "script", "exec")
    assert all(line in script for line in lines) and "'revision': 'cccc" in script
    assert ("bitsandbytes" in needed) == ("frozen" in changes.get("train", {}))
    assert ("torchvision" in needed) == ("cache" in changes)


def test_system_texts_are_in_the_script_unless_the_records_have_several(make_run, sample, tmp_path):
    records = read_records(sample / "train.jsonl")

    def script(*systems: str, **data: str) -> str:
        write_lines(tmp_path / "a.jsonl", *map(as_line, records), *(as_line(records[0], system=one) for one in systems))
        run = make_run(data={"train": [str(tmp_path / "a.jsonl")]} | data)
        return task1_files(run, BaseModel(BASE, None, None), NAME, "medico", SubmissionInfo())["submission_task1.py"]

    text = 'It\'s a "test", {{ x }}.'
    assert f"SYSTEM = {text!r}\n" in script(text) and "SYSTEM = None\n" in script()
    with pytest.raises(UsageError, match="have 2 different system texts"):
        script("a", "b")
    assert "SYSTEM = 'Brief.'\n" in script("a", "b", system="Brief.")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UsageError, match="cannot be read any more, .* make .*a.jsonl readable again"):
        task1_files(
            make_run(data={"train": [str(tmp_path / "a.jsonl")]}),
            BaseModel(BASE, None, None),
            NAME,
            "medico",
            SubmissionInfo(),
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repo", "x"], "--repo needs --repo-id"),
        (["--repo", "x", "--repo-id", NAME, "--split", "val"], "takes none of --split"),
        (["--repo", "x", "--repo-id", NAME, "--explain", "q"], "--explain needs --task2"),
        (["--repo-id", NAME], "belong to --repo DIR"),
        (["--repo", "x", "--repo-id", NAME], "name it: --base-model OWNER/NAME"),
        (["--repo", "x", "--repo-id", "adapter", "--base-model", BASE], "'adapter' is not the name of a repository"),
        (
            ["--repo", "full", "--repo-id", NAME, "--base-model", BASE],
            "full/requirements.txt exists; name another folder",
        ),
        (
            ["--repo", "x", "--repo-id", NAME, "--task2", "t.jsonl", "--to", "medvqa-gi"],
            "--task2 writes the form of medico",
        ),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(trained, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "requirements.txt").write_text("")
    result = invoke("export", trained.folder, "--to", "medico", *words)
    assert result.exit_code == 2 and message in result.output, result.output
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "requirements.txt"]
