"""Answers to any questions: those of an evaluation, each image encoded once, whatever stops one question."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from lookonce.cache.model.tower import Tower
from lookonce.cli import main
from lookonce.datasets.images import image_key
from lookonce.datasets.records import read_records, write_records
from lookonce.errors import ImageError, RunFolderError, TrainingError
from lookonce.eval import answerer as rounds
from lookonce.eval.answerer import Answerer, LiveFeatures, ask_each
from lookonce.eval.answers.files import PartialAnswers
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.predict import predict
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.prediction import read_predictions
from lookonce.run.config import RunFile
from lookonce.workflow import train

ENGINES = ("shared", "generate")
QUESTIONS = ["Is there text?", "How many polyps are in the image?", "Is there a box?"]
QUIET = {"notify": lambda note: None}


@pytest.fixture(scope="module")
def trained(make_run_in, sample, built, tmp_path_factory) -> RunFile:
    """A trained run with varied answers. Tests must not change its adapter."""
    run = make_run_in(
        tmp_path_factory.mktemp("asked"),
        cache={"dir": str(built.folder.parent)},
        train={"steps": 6, "learning_rate": 0.01},
        lora={"modules_to_save": ["embed_tokens"]},
        eval={"max_new_tokens": 6},
    )
    train(run, **QUIET)
    return run


@pytest.fixture
def run_file(trained, tmp_path):
    """Writes a run file of the trained run, with other settings of a section."""

    def write(engine: str = "shared", **changes) -> Path:
        sections = {"eval": {"engine": engine, "tokens_per_batch": 600} | changes.pop("eval", {})} | changes
        parts = {name: getattr(trained, name).model_copy(update=change) for name, change in sections.items()}
        path = tmp_path / f"{engine}.yaml"
        path.write_text(trained.model_copy(update=parts).to_yaml())
        return path

    return write


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The number of images of each batch that the tower encodes."""
    found, real = [], Tower.encode
    monkeypatch.setattr(
        Tower, "encode", lambda self, patches, grids: found.append(len(grids)) or real(self, patches, grids)
    )
    return found


def lookonce(*words: str | Path, code: int = 0) -> Result:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(answers: list[Answer]) -> list[tuple]:
    return [(answer.text, answer.token_ids, answer.ended, round(answer.logprob, 3)) for answer in answers]


@pytest.mark.guarantee(
    "`lookonce predict` and `Answerer` give the tokens of `lookonce eval`, with each engine, all at once or "
    "one at a time, from the cache or not."
)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_answers_are_those_of_the_evaluation_and_one_at_a_time_gives_the_same(
    engine, trained, run_file, sample, tmp_path, encoded
):
    evaluate_run(run_file(engine), "val", **QUIET)
    expected = read_predictions(trained.output / "predictions" / "val.jsonl")
    assert len({row.predicted for row in expected}) > 10, "answers differ, also from image to image"
    lookonce("predict", run_file(engine), "--records", sample / "val.jsonl", "-o", tmp_path / "out.jsonl")
    found = rows(tmp_path / "out.jsonl")
    for name in ("origin", "question", "answer", "predicted", "num_tokens", "ended", "turn", "source"):
        assert [row.get(name) for row in found] == [getattr(row, name) for row in expected], name
    assert [row["logprob"] for row in found] == pytest.approx([row.logprob for row in expected], abs=1e-4)
    assert [tuple(row["image_keys"]) for row in found] == [row.image_keys for row in expected]
    assert not encoded, "all images are in the cache"
    answerer = Answerer.open(run_file(engine))
    for row in expected[::10]:
        [answer] = answerer.answer(row.images[0], row.question)
        assert (answer.text, answer.num_tokens, answer.ended) == (row.predicted, row.num_tokens, row.ended)
        assert answer.logprob == pytest.approx(row.logprob, abs=1e-4)


@pytest.fixture
def in_memory(monkeypatch) -> list[int]:
    """The number of image tokens whose features are in memory, at each use."""
    found, real = [], LiveFeatures.load

    def load(self, keys, *device):
        found.append(sum(len(image.features) for image in self._encoded.values()))
        return real(self, keys, *device)

    monkeypatch.setattr(LiveFeatures, "load", load)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_cache_each_distinct_image_is_encoded_once_and_the_answers_are_the_same(
    engine, trained, run_file, sample, tmp_path, encoded, in_memory, monkeypatch
):
    monkeypatch.setattr(rounds, "ROUND_TOKENS", 300)
    pattern = str(sample / "images" / "*.jpg")
    asking = ["--images", pattern, "--question", QUESTIONS[0]]
    lookonce("predict", run_file(engine), *asking, "-o", tmp_path / "cached.jsonl")
    assert not encoded
    elsewhere = run_file(engine, cache={"dir": tmp_path / "nowhere"})
    asking[1] = str(sample / "images")  # the folder stands for the same images
    done = lookonce("predict", elsewhere, *asking, "-o", tmp_path / "live.jsonl", "--json")
    assert (tmp_path / "live.jsonl").read_bytes() == (tmp_path / "cached.jsonl").read_bytes()
    num_files = len(list((sample / "images").glob("*.jpg")))
    summary = json.loads(done.stdout)
    assert sum(encoded) == summary["num_images"] == 64 < num_files
    assert 100 < max(in_memory) <= 300
    assert summary["num_answered"] == num_files and not summary["skipped"]
    assert f"asking about {num_files} images" in done.stderr
    assert not (tmp_path / "nowhere").exists() and not list(tmp_path.glob("*partial*"))


def test_what_cannot_be_answered_is_named_and_all_else_is_answered(run_file, sample, tmp_path):
    good, second = sorted((sample / "images").glob("*.jpg"))[:2]
    (tmp_path / "broken.jpg").write_bytes(good.read_bytes()[:300])
    asked = [
        {"image": str(good), "question": "Is there text?"},
        {"image": "gone.jpg", "question": "Is there text?"},
        {"image": "gone.jpg", "question": "Is there a box?"},
        {"image": str(second), "question": " "},
        {"image": "broken.jpg", "question": "Is there text?"},
        {"image": str(second), "question": "Is it <|im_end|>?"},
        {"image": str(good), "question": "Is there a box?" + " Is it?" * 400},
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, asked)))
    words = ["predict", run_file(), "--records", tmp_path / "q.jsonl", "-o", tmp_path / "out.csv"]
    done = lookonce(*words, code=1)
    assert "wrote 2 answers" in done.stdout and len((tmp_path / "out.csv").read_text().splitlines()) == 3
    for words in ("skipped 2 questions", "q.jsonl:2): cannot read image", "gone.jpg", "q.jsonl:4", "special token"):
        assert words in done.stderr
    assert "cannot decode image" in done.stderr and "q.jsonl:5" in done.stderr
    again = lookonce("predict", run_file(), "--records", tmp_path / "q.jsonl", "--json", code=1)
    summary = json.loads(again.stdout)
    assert (summary["num_answered"], summary["num_skipped"]) == (2, 5)
    assert [row["question"][:15] for row in summary["predictions"]] == ["Is there text?", "Is there a box?"]


def test_a_file_name_that_is_not_utf8_is_named_and_all_else_is_answered(run_file, sample, tmp_path):
    (tmp_path / "in").mkdir()
    for name in (b"caf\xe9.jpg", b"good.jpg"):
        Path(tmp_path / "in" / os.fsdecode(name)).write_bytes((sample / "images" / "frame-0026.jpg").read_bytes())
    words = ["--images", tmp_path / "in", "--question", "Is there text?", "-o", tmp_path / "out[1].jsonl"]
    done = lookonce("predict", run_file(), *words, code=1)
    assert "wrote 1 answer" in done.stdout and "is not UTF-8, and cannot be written; rename it" in done.stderr
    assert [path.name for path in tmp_path.glob("out*")] == ["out[1].jsonl"]


@pytest.mark.guarantee("An interrupted `lookonce predict` ends with the same bytes.")
def test_an_interrupted_command_resumes_with_the_same_bytes(run_file, sample, tmp_path, encoded, monkeypatch):
    monkeypatch.setattr(rounds, "ROUND_TOKENS", 100)
    live = run_file(cache={"dir": tmp_path / "nowhere"})
    words = ["predict", live, "--records", sample / "val.jsonl", "-o", tmp_path / "out.jsonl"]
    lookonce(*words)
    num_encoded = len(encoded)
    whole = (tmp_path / "out.jsonl").read_bytes()
    num_asked = len(whole.splitlines())
    assert "exists; name another file" in lookonce(*words, code=2).stderr

    def attempt(number: signal.Signals, after: int, code: int) -> tuple[int, str]:
        """Run it with a signal after some answers; returns the number of answers given, and stderr."""
        given, real = [], PartialAnswers.add

        def add(*arguments) -> None:
            if len(given) == after:
                signal.raise_signal(number)
            given.append(real(*arguments))

        with monkeypatch.context() as patch:
            patch.setattr(PartialAnswers, "add", add)
            said = lookonce(*words, "--overwrite", code=code).stderr
        return len(given), said

    attempt(signal.SIGINT, 20, 130)
    assert "run the same command again" in attempt(signal.SIGTERM, 24, 75)[1]
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    encoded.clear()
    num_given, said = attempt(signal.SIGINT, num_asked - 20, 0)
    assert 0 < len(encoded) < num_encoded, "images whose questions are answered are not needed again"
    assert f"of {num_asked} questions were answered before" in said and num_given < num_asked - 20
    assert (tmp_path / "out.jsonl").read_bytes() == whole and not list(tmp_path.glob("*partial*"))


def test_untuned_answers_need_no_training(run_file, make_run, built, sample, tmp_path):
    run = make_run(cache={"dir": str(built.folder.parent)}, eval={"max_new_tokens": 6})
    (tmp_path / "new.yaml").write_text(run.to_yaml())
    evaluate_run(tmp_path / "new.yaml", "val", ("untuned",), **QUIET)
    expected = [row.predicted for row in read_predictions(run.output / "predictions" / "val-untuned.jsonl")]
    for place in (tmp_path / "new.yaml", run.output, run_file()):
        lookonce(
            "predict", place, "--untuned", "--records", sample / "val.jsonl", "-o", tmp_path / "a.jsonl", "--overwrite"
        )
        assert [row["predicted"] for row in rows(tmp_path / "a.jsonl")] == expected
    with pytest.raises(RunFolderError, match="no trained adapter"):
        Answerer.open(run.output)
    frame = next((sample / "images").glob("*.jpg"))
    one = lookonce("predict", sample / "model", "--untuned", "--image", frame, "--question", QUESTIONS[0], "--json")
    assert json.loads(one.stdout)["ended"] in ("stop", "length")
    assert "no model folder at" in lookonce("predict", "nowhere", "--untuned", "--question", "q", code=1).stderr


def test_images_of_pillow_in_any_mode_are_answered_as_their_files(run_file, sample, tmp_path, encoded):
    answerer = Answerer.open(run_file())
    frames = sorted((sample / "images").glob("*.jpg"))[:2]
    with Image.open(frames[0]) as image:
        exif = Image.Exif()
        exif[0x0112] = 6  # to be rotated
        image.save(tmp_path / "turned.png", exif=exif)
        image.convert("L").save(tmp_path / "grey.png")
        image.convert("RGBA").save(tmp_path / "alpha.png")
    paths = [*frames, *(tmp_path / f"{name}.png" for name in ("turned", "grey", "alpha"))]
    expected = answerer.answer(paths, QUESTIONS)
    assert len(expected) == len(paths) * len(QUESTIONS)
    encoded.clear()
    images = [Image.open(path) for path in paths]
    found = answerer.answer([*images, images[0]], QUESTIONS)
    assert texts(found) == texts([*expected, *expected[: len(QUESTIONS)]])
    assert len(encoded) < len(images), "equal images are encoded once"
    assert texts(answerer.answer(images[1], QUESTIONS[0])) == texts(expected[len(QUESTIONS) : len(QUESTIONS) + 1])
    together, alone = answerer.answer([(frames[0], images[1]), ()], QUESTIONS[:1])
    assert texts(answerer.answer((), QUESTIONS[0])) == texts([alone]) and together.num_tokens > 0
    assert answerer.answer([], QUESTIONS[0]) == []
    with pytest.raises(ImageError, match="cannot read image"):
        answerer.answer([frames[0], "gone.jpg"], QUESTIONS)


def test_a_question_that_does_not_fit_the_memory_does_not_stop_the_others(run_file, sample, monkeypatch):
    answerer = Answerer.open(run_file())
    frame = next((sample / "images").glob("*.jpg"))
    asked = ask_each([(frame,)], QUESTIONS)
    expected = predict(answerer, asked).rows
    real = answerer._engine.stream

    def stream(model, batches, notify):
        if any(dialogue.first.origin.endswith(":2") for batch in batches for dialogue in batch):
            raise TrainingError("the GPU is out of memory for one question")
        return real(model, batches, notify)

    monkeypatch.setattr(answerer._engine, "stream", stream)
    report = predict(answerer, asked)
    assert report.skipped == {"the GPU is out of memory for one question": [f"{frame}:2"]}
    assert [row["predicted"] for row in report.rows] == [expected[0]["predicted"], expected[2]["predicted"]]


def test_several_images_and_turns_keep_their_order_and_need_each_image_in_memory_once(
    run_file, sample, tmp_path, encoded, monkeypatch
):
    monkeypatch.setattr(rounds, "ROUND_TOKENS", 60)
    some = read_records(sample / "train.jsonl")
    distinct = list({image_key(record.images[0]): record for record in some}.values())[:4]
    pairs = [replace(one, images=(*one.images, *other.images)) for one in distinct for other in distinct]
    turns = [replace(one, turns=(*one.turns, *other.turns)) for one, other in zip(pairs, pairs[::-1], strict=True)]
    write_records(tmp_path / "q.jsonl", [*pairs, *distinct, *turns], absolute=True, image_root=sample)
    arguments = ["--records", tmp_path / "q.jsonl", "--image-root", sample]
    lookonce("predict", run_file(), *arguments, "-o", tmp_path / "a.jsonl")
    live = run_file(cache={"dir": tmp_path / "nowhere"})
    lookonce("predict", live, *arguments, "-o", tmp_path / "b.jsonl")
    found = rows(tmp_path / "a.jsonl")
    assert found == rows(tmp_path / "b.jsonl") and sum(encoded) == len(distinct)
    assert Counter(row["turn"] for row in found) == {0: 36, 1: 16}
    lines = [int(row["origin"].rpartition(":")[2]) for row in found]
    assert lines == [*range(1, 21), *(number for number in range(21, 37) for _ in range(2))]


def test_a_cache_with_a_damaged_shard_is_not_read(trained, run_file, built, sample, tmp_path):
    shutil.copytree(built.folder, tmp_path / "caches" / built.folder.name)
    damaged = next((tmp_path / "caches").glob("*/shards/*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1000] + bytes(1000))
    place = run_file(cache={"dir": tmp_path / "caches"})
    done = lookonce("predict", place, "--records", sample / "train.jsonl", "--json", code=1)
    assert "checksum" in done.stderr and "lookonce cache repair" in done.stderr
