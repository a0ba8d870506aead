"""The command line: help with examples, exit codes, data on stdout, errors without a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from lookonce.cli import main
from lookonce.datasets.records import Record, Turn, write_records
from lookonce.errors import CacheError, Stopped, UsageError


def commands(command: click.Command = main, names: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """Every command by the words that call it."""
    found = {names: command}
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            found |= commands(child, (*names, name))
    return found


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def run_file(make_run, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(make_run().to_yaml())
    return path


@pytest.mark.parametrize("names", commands(), ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help_and_every_leaf_has_examples(names, flag):
    result = run(*names, flag)
    assert result.exit_code == 0
    assert isinstance(commands()[names], click.Group) or "Examples:" in result.stdout


@pytest.mark.parametrize("names", commands(), ids=" ".join)
def test_examples_in_help_are_commands_that_parse(names):
    examples = [line.split() for line in run(*names, "-h").stdout.splitlines() if line.startswith("    lookonce ")]
    for words in examples:
        arguments = [word.strip('"') for word in words[1:]]
        found = max((name for name in commands() if tuple(arguments[: len(name)]) == name), key=len)
        options = {option for parameter in commands()[found].params for option in parameter.opts}
        assert not isinstance(commands()[found], click.Group)
        assert {word for word in arguments if word.startswith("--")} <= options


def test_all_that_report_can_print_json():
    leaves = {names: command for names, command in commands().items() if not isinstance(command, click.Group)}
    assert all(any("--json" in parameter.opts for parameter in command.params) for command in leaves.values())


def test_the_phases_report_json_on_stdout_alone(run_file):
    plan = run("cache", "plan", run_file, "--json")
    assert json.loads(plan.stdout)["num_images"] == 64
    built = json.loads(run("cache", "build", run_file, "--json").stdout)
    assert (built["num_encoded"], built["num_reused"]) == (64, 0)
    again = run("cache", "build", run_file)
    assert "nothing new encoded, 64 of 64 images reused" in again.stdout
    assert json.loads(run("cache", "status", run_file, "--json").stdout)["num_done"] == 64


@pytest.fixture
def cache(run_file) -> Path:
    """The folder of a cache that the run file means."""
    assert run("cache", "build", run_file).exit_code == 0
    [manifest] = (run_file.parent / "caches").glob("*/manifest.json")
    return manifest.parent


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_cache_is_verified_by_run_file_and_by_folder(run_file, cache):
    for words in ((run_file,), (cache,), (cache, "--level", "quick")):
        result = run("cache", "verify", *words)
        assert (result.exit_code, result.stderr) == (0, "") and "64 images in 2 shards" in result.stdout
    result = run("cache", "verify", run_file, "--level", "recompute", "--images", 3, "--json")
    assert result.exit_code == 0 and len(json.loads(result.stdout)["errors"]) == 3


def test_damage_is_found_mended_and_gone(run_file, cache):
    flip(cache / "shards" / "shard-00001.safetensors")
    result = run("cache", "verify", run_file)
    assert result.exit_code == 1 and "mend it with: lookonce cache repair RUN.yaml" in result.stdout
    [problem] = json.loads(run("cache", "verify", cache, "--json").stdout)["problems"]
    assert problem["shard"] == "shard-00001" and Path(problem["file"]).exists()
    result = run("cache", "repair", run_file)
    assert result.exit_code == 0 and "removed 1 damaged shard (shard-00001)" in result.stdout
    assert "encoded 15 images" in result.stdout
    assert run("cache", "verify", run_file).exit_code == 0
    nothing = json.loads(run("cache", "repair", run_file, "--json").stdout)
    assert (nothing["repair"]["num_problems"], nothing["build"]) == (0, None)


def test_what_can_not_be_mended_exits_with_1_until_it_is_dropped(make_run, sample, tmp_path, run_file, cache):
    flip(cache / "shards" / "shard-00001.safetensors")
    key = next(iter(json.loads((cache / "receipts" / "shard-00001.json").read_text())["images"]))
    image = Path(json.loads(run("cache", "show", cache, key, "--json").stdout)["files"][0])
    content = image.read_bytes()
    image.unlink()
    try:
        result = run("cache", "repair", run_file)
        assert result.exit_code == 1 and f"can not be had again: {key}" in result.stdout
        result = run("cache", "repair", run_file, "--drop", "--json")
        assert result.exit_code == 0 and json.loads(result.stdout)["repair"]["lost"] == [key]
    finally:
        image.write_bytes(content)


def test_an_image_is_shown_by_its_file(run_file, cache, sample):
    path = sample / "images" / "frame-0026.jpg"
    shown = json.loads(run("cache", "show", run_file, path, "--json").stdout)
    assert (shown["state"], shown["files"], shown["checksum_ok"]) == ("encoded", [str(path)], True)
    assert shown["key"] in run("cache", "show", cache, shown["key"][:12]).stdout


def test_caches_are_listed_and_deleted_by_name(run_file, cache):
    for place in (run_file, cache, cache.parent):
        assert cache.name in run("cache", "gc", place).stdout
    assert run("cache", "gc", run_file, "--delete", "--cache", cache.name[:8]).exit_code == 0
    assert not cache.exists()


def test_a_cache_is_staged_whole_or_as_far_as_a_run_reads_it(run_file, cache, tmp_path):
    result = run("cache", "stage", run_file, tmp_path / "local", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["num_copied"] == 2
    assert "nothing copied, 2 there before" in run("cache", "stage", cache, tmp_path / "local", "--verify").stdout
    flip(cache / "shards" / "shard-00000.safetensors")
    assert run("cache", "stage", cache, tmp_path / "other").exit_code == 1


def test_a_written_plan_is_shared_by_workers(run_file):
    written = run("cache", "plan", run_file, "--pilot", 0, "--write")
    assert "to do     2 shards" in written.stdout and "--worker I/N" in written.stderr
    result = run("cache", "build", run_file, "--worker", "1/2", "--no-wait", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["num_encoded"] == 64


@pytest.mark.parametrize("number", ["3", "3/2", "-1/2", "0/0", "1/2/3", "a/b", ""])
def test_a_worker_is_one_of_several(run_file, number):
    result = run("cache", "build", run_file, "--worker", number)
    assert result.exit_code == 2 and "0 <= I <= N and N >= 1, for example 3/8" in result.stderr


def test_so_many_quarantined_images_are_no_failure(make_run, sample, tmp_path):
    (tmp_path / "bad.jpg").write_text("no image")
    good = tmp_path / "good.jpg"
    good.write_bytes((sample / "images" / "frame-0026.jpg").read_bytes())
    turns = (Turn("What is it?", "a frame"),)
    write_records(tmp_path / "train.jsonl", [Record((image,), turns) for image in (good, tmp_path / "bad.jpg")])
    path = tmp_path / "run.yaml"
    path.write_text(make_run(data={"train": str(tmp_path / "train.jsonl"), "val": [], "test": []}).to_yaml())
    result = run("cache", "build", path)
    assert result.exit_code == 1 and "1 image could not be encoded" in result.stdout
    assert run("cache", "build", path, "--max-quarantined", 1).exit_code == 0
    assert json.loads(run("cache", "build", path, "--retry-quarantined", "--json").stdout)["num_reused"] == 1


def test_a_status_is_watched_until_all_is_there(run_file, monkeypatch):
    run("cache", "plan", run_file, "--pilot", 0, "--write")
    waits = []

    def build(seconds):
        waits.append(seconds)
        run("cache", "build", run_file)

    monkeypatch.setattr("lookonce.commands.cache.time.sleep", build)
    result = run("cache", "status", run_file, "--watch", 0.5)
    assert waits == [0.5] and result.exit_code == 0
    first, last = result.stdout.splitlines()
    assert first.startswith("0 of 64 images, 0 quarantined, 0 workers alive")
    assert last.startswith("64 of 64 images")
    lines = run("cache", "status", run_file, "--watch", 0.5, "--json").stdout.splitlines()
    assert [json.loads(line)["num_done"] for line in lines] == [64]


def test_a_watch_ends_quietly_when_interrupted(run_file, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("lookonce.commands.cache.time.sleep", interrupt)
    result = run("cache", "status", run_file, "--watch", 1)
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("cache", "build", "nothing.yaml"), 2, "nothing.yaml"),
        (("train", "RUN", "--set", "train.epoch=3"), 2, "did you mean `epochs`?"),
        (("train", "RUN"), 1, "make it with: lookonce cache build"),
        (("train", "RUN", "--set", "model.path=nowhere"), 1, "no model folder at"),
        (("train", "RUN", "--set", "data.train=nowhere.jsonl"), 1, "no records file at"),
        (("eval", "nowhere"), 1, "is no run's folder; make one with: lookonce train"),
        (("predict", "nowhere", "--image", "x.jpg", "--question", "q"), 1, "is no run's folder"),
        (
            ("cache", "verify", "nothing"),
            2,
            "there is nothing at nothing; name a run file (YAML) or the folder of a cache",
        ),
        (
            ("cache", "show", "PICTURE", "x.jpg"),
            2,
            "is no folder, so it was read as a run file; name",
        ),
        (("cache", "stage", "nothing", "local"), 2, "name a run file (YAML) or the folder of a cache"),
        (("cache", "verify", "RUN"), 1, "is no cache: it has no manifest.json; make one with: lookonce cache build"),
        (("cache", "verify", "FOLDER"), 1, "is no cache"),
        (("cache", "verify", "FOLDER", "--set", "cache.dtype=float32"), 2, "--set replaces keys of a run file"),
        (("cache", "verify", "FOLDER", "--level", "recompute"), 2, "name the run file instead of"),
        (("cache", "verify", "RUN", "--level", "recompute"), 1, "is no cache"),
        (("cache", "verify", "FOLDER", "--images", "16"), 2, "--images is for --level recompute; leave it out or"),
        (("cache", "verify", "RUN", "--level", "quick", "--seed", "1"), 2, "--seed is for --level recompute"),
        (("cache", "repair", "RUN"), 1, "holds no shards to repair"),
        (
            ("cache", "repair", "FOLDER"),
            2,
            "is a folder; name a run file (YAML), which says where images and model are",
        ),
        (("train", "FOLDER"), 2, "is a folder; name a run file (YAML)"),
        (("cache", "show", "RUN", "x.jpg"), 1, "is no cache"),
        (("cache", "gc", "RUN"), 1, "no folder of caches at"),
        (
            ("cache", "gc", "nothing"),
            2,
            "there is nothing at nothing; name a run file (YAML), the folder of a cache, or of",
        ),
        (("cache", "gc", "FOLDER", "--cache", "01234567"), 2, "add --delete"),
        (("cache", "gc", "FOLDER", "--delete", "--cache", "0123"), 2, "give at least 8 digits"),
        (("cache", "stage", "FOLDER", "local"), 1, "is no cache"),
        (("cache", "plan", "RUN", "--pilot", "-1"), 2, "--pilot"),
        (("no-such-command",), 2, "No such command"),
        (("train",), 2, "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_give_a_message_and_an_exit_code_without_a_traceback(run_file, sample, words, code, message):
    places = {"RUN": run_file, "FOLDER": run_file.parent, "PICTURE": sample / "images" / "frame-0026.jpg"}
    result = run(*(places.get(word, word) for word in words))
    assert result.exit_code == code
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("no"), 2, "Error: no"),
        (CacheError("gone"), 1, "Error: gone"),
        (Stopped("stopped by SIGUSR1"), 75, "Error: stopped by SIGUSR1"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, "the same command goes on"),
        (
            ZeroDivisionError("division by zero"),
            1,
            "unexpected ZeroDivisionError: division by zero (`lookonce --debug ...` shows",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_goes_wrong_is_a_message(monkeypatch, run_file, error, code, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("lookonce.run.config.read_run_file", fail)
    result = run("cache", "build", run_file)
    assert result.exit_code == code and message in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_where():
    result = run("--debug", "cache", "build", "nothing.yaml")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "options.py" in result.stderr
