"""The command line: help with examples, exit codes, data on stdout, errors without a traceback."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from support.answers import look_trained
from support.commands import all_commands
from support.rows import run

from lookonce.cli import main
from lookonce.errors import CacheError, Stopped, UsageError
from lookonce.run.folder import RunFolder
from lookonce.selftest.report import Check, Report, Variant

COMMANDS = dict(all_commands())
"""Every command by the words that call it."""
LEAVES = {names: command for names, command in COMMANDS.items() if not isinstance(command, click.Group)}


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples_that_parse(names):
    result = run(*names, "-h")
    assert result.exit_code == 0
    examples = [line.split() for line in result.stdout.splitlines() if line.startswith("    lookonce ")]
    assert examples or isinstance(COMMANDS[names], click.Group)
    for words in examples:
        arguments = [word.strip('"') for word in words[1:]]
        found = max((name for name in COMMANDS if tuple(arguments[: len(name)]) == name), key=len)
        options = {option for parameter in COMMANDS[found].params for option in parameter.opts}
        assert not isinstance(COMMANDS[found], click.Group)
        assert {word for word in arguments if word.startswith("--")} <= options


def test_all_commands_can_print_json():
    assert all(any("--json" in parameter.opts for parameter in command.params) for command in LEAVES.values())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("cache", "build", "nothing.yaml"), 2, "nothing.yaml"),
        (("train", "RUN", "--set", "train.epoch=3"), 2, "did you mean `epochs`?"),
        (("train", "RUN"), 1, "build it with: lookonce cache build"),
        (("eval", "nowhere"), 1, "is not a run folder; make one with: lookonce train"),
        (("cache", "verify", "nothing"), 2, "nothing does not exist; name a run file (YAML) or the folder of a cache"),
        (("cache", "show", "PICTURE", "x.jpg"), 2, "is not a folder, so it was read as a run file; name"),
        (
            ("cache", "verify", "RUN"),
            1,
            "is not a cache: it has no manifest.json; build one with: lookonce cache build",
        ),
        (("cache", "verify", "FOLDER", "--set", "cache.dtype=float32"), 2, "--set replaces keys of a run file"),
        (("cache", "repair", "RUN"), 1, "holds no shards to repair"),
        (("cache", "repair", "FOLDER"), 2, "is a folder; name a run file (YAML), which names model and records"),
        (("train", "FOLDER"), 2, "is a folder; name a run file (YAML)"),
        (("cache", "gc", "RUN"), 1, "no folder of caches at"),
        (("cache", "gc", "nothing"), 2, "nothing does not exist; name a run file (YAML), the folder of a cache, or of"),
        (("cache", "gc", "FOLDER", "--cache", "01234567"), 2, "add --delete"),
        (("cache", "gc", "FOLDER", "--delete", "--cache", "0123"), 2, "give at least 8 digits"),
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
        (MemoryError(), 1, "Error: out of memory: a request was refused. "),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
            1,
            "can't allocate memory. ",
        ),
        (
            BrokenProcessPool("A process in the process pool was terminated abruptly while the future was running."),
            1,
            "lower what is in memory at once",
        ),
        (
            RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"),
            1,
            "Error: another process of this command has ended or does not answer; its message or the launcher's says "
            "why; then run the same command again",
        ),
        (KeyboardInterrupt(), 130, "interrupted; run the same command again"),
        (
            ZeroDivisionError("division by zero"),
            1,
            "unexpected ZeroDivisionError: division by zero (`lookonce --debug ...` shows",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_error_is_a_message(monkeypatch, run_file, error, code, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("lookonce.run.config.read_run_file", fail)
    result = run("cache", "build", run_file)
    assert result.exit_code == code and message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("stop", "code"), [(Stopped("stopped by SIGTERM"), 75), (KeyboardInterrupt("interrupted"), 130)]
)
def test_a_signal_while_a_class_is_made_stops_as_anywhere(monkeypatch, run_file, stop, code):
    class Field:
        def __set_name__(self, *_):
            raise stop

    monkeypatch.setattr("lookonce.run.config.read_run_file", lambda *_, **__: type("Owner", (), {"field": Field()}))
    result = run("cache", "build", run_file)
    assert result.exit_code == code and f"Error: {stop}" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        *("train RUN", "eval RUN", "predict RUN --question q", "study run STUDY", "bench step RUN"),
        *("adapter merge RUN new", "cache build RUN"),
    ],
)
@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("RANK", "x")])
def test_what_is_left_of_torchrun_in_the_environment_is_named_by_all_commands(
    run_file, monkeypatch, words, name, value
):
    monkeypatch.setenv(name, value)
    places = {"RUN": run_file, "STUDY": run_file.with_name("study.yaml")}
    result = run(*(places.get(word, word) for word in words.split()))
    said = " ".join(result.output.split())
    assert result.exit_code in (1, 2) and "Traceback" not in said and "section is not valid" not in said
    assert re.search(rf"{name}='?{value}\b", said) and f"unset {name}" in said, said
    assert "rank" not in result.stderr[:12]


def stopped(names: tuple[str, ...], number: signal.Signals, monkeypatch) -> Result:
    """The result of a command that gets a signal in the middle of its work."""

    def work(**_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(LEAVES[names], "callback", work)
    monkeypatch.setattr(LEAVES[names], "params", [])
    return run(*names)


@pytest.mark.guarantee("A signal or Ctrl-C ends every command with a documented exit code and one line.")
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGTERM, 75, "stopped by SIGTERM"),
        (signal.SIGUSR1, 75, "stopped by SIGUSR1"),
        (signal.SIGHUP, 75, "stopped by SIGHUP"),
        (signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_signal_ends_every_command_with_a_documented_exit_code_and_a_line(root, monkeypatch, number, code, message):
    assert f"\n| {code} | " in (root / "docs" / "troubleshooting.md").read_text()
    before = signal.getsignal(number)
    for names in LEAVES:
        result = stopped(names, number, monkeypatch)
        assert result.exit_code == code, names
        again = "with --resume to continue" if names == ("train",) else "again"
        assert (result.stderr, result.stdout) == (f"Error: {message}; run the same command {again}\n", ""), names
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_the_parent_process_ignores_stays_ignored(monkeypatch, number):
    """SIGHUP under nohup, and SIGINT after a script's `&`."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert stopped(("check",), number, monkeypatch).exit_code == 0
    finally:
        signal.signal(number, before)


def test_an_interrupted_prompt_is_an_interrupted_command(monkeypatch):
    class Interrupted(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: bytearray) -> int:
            if buffer:
                signal.raise_signal(signal.SIGINT)
            return 0

    monkeypatch.setattr("lookonce.commands.prepare.is_terminal", lambda: True)
    result = CliRunner().invoke(main, ["init", "run.yaml"], input=io.BufferedReader(Interrupted()))
    assert result.exit_code == 130 and "Error: interrupted; run the same command again\n" in result.stderr


def test_debug_shows_where():
    result = run("--debug", "cache", "build", "nothing.yaml")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "options.py" in result.stderr


@pytest.mark.parametrize("words", [("train", "RUN"), ("cache", "verify", "RUN"), ("eval", "RUN"), ("status", "RUN")])
def test_advice_names_the_run_file_that_was_given_with_the_keys_that_are_set(run_file, monkeypatch, words):
    def fail(*args, **kwargs):
        raise CacheError("broken; run: lookonce cache repair RUN.yaml, not my-RUN.yaml")

    opened = ("lookonce.run.open.open_run", "lookonce.eval.run.evaluate_run", "lookonce.run.open.source_of")
    for name in (*opened, "lookonce.status.find_state"):
        monkeypatch.setattr(name, fail)
    monkeypatch.chdir(run_file.parent)
    path = run_file.rename("my run.yaml").name
    result = run(*(path if word == "RUN" else word for word in words))
    assert "broken; run: lookonce cache repair 'my run.yaml', not my-RUN.yaml" in result.stderr
    result = run(*(path if word == "RUN" else word for word in words), "--set", "cache.dir=a b")
    assert "cache repair 'my run.yaml' --set 'cache.dir=a b', not my-RUN.yaml" in result.stderr


ONE_OF = "questions come either from --records, with --image-root for its images, or from --question"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), ONE_OF),
        (("--records", "q.jsonl", "--question", "q"), ONE_OF),
        (("--images", "*.jpg", "--image", "a.jpg", "--question", "q"), ONE_OF),
        (("--image", "a.jpg"), ONE_OF),
        (("--question", "q", "--image-root", "x"), ONE_OF),
        (("--images", "*.nothing", "--question", "q"), "matches no file"),
        (("--question", ""), "question 1 of 1 is empty"),
        (("--question", "q", "-o", "out.txt"), "the suffix decides"),
    ],
)
def test_options_of_predict_that_do_not_fit_are_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("predict", "nowhere", *words)
    assert done.exit_code == 2 and message in done.stderr
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in run("predict", "nowhere", *words).stderr


def test_a_selftest_ends_with_1_if_a_difference_is_larger_than_its_spread_and_names_the_settings(monkeypatch):
    def result(difference: float, *words: str) -> Result:
        report = Report({"device": "NVIDIA H200", "torch": "2.11.0"}, (Check("model", difference, 0.1, Variant()),), 1)
        monkeypatch.setattr("lookonce.selftest.model.run_selftest", lambda notify: report)
        return run("selftest", *words)

    done = result(0.05)
    assert done.exit_code == 0 and "5.0e-02  1.0e-01  ok" in done.stdout
    done = result(0.5, "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["fastest"] == "--set batch.mode=separate"
    assert "Error" not in done.stderr


def test_a_status_takes_a_run_folder_too_also_one_that_was_moved(monkeypatch, make_run, tmp_path):
    made, opened = make_run(), []
    RunFolder(made.output).claim(made, {})
    moved = made.output.rename(tmp_path / "moved")

    def interrupt(found):
        opened.append(found)
        raise KeyboardInterrupt

    monkeypatch.setattr("lookonce.status.find_state", interrupt)
    assert run("status", moved).exit_code == 130
    assert opened[0].output == moved and opened[0].train == made.train
    refused = run("status", moved, "--set", "train.epochs=2")
    assert "is a folder; leave it out or name a run file" in refused.stderr
    assert "is not a run folder" in run("status", tmp_path).stderr


def test_json_on_stdout_is_alone_whatever_libraries_print(run_file, monkeypatch):
    def train(run, **options):
        print("[INFO] Running in WANDB offline mode")
        options["notify"]("read records: 0.1 s")
        return SimpleNamespace(to_json=lambda: {"num_steps": 3}, text=str)

    monkeypatch.setattr("lookonce.workflow.train", train)
    result = run("train", run_file, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"num_steps": 3}
    first, *said = result.stderr.splitlines()
    assert first.startswith("load libraries: ") and said == [
        "[INFO] Running in WANDB offline mode",
        "read records: 0.1 s",
    ]


@pytest.fixture
def study_file(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variants = {"a": None, "b": {"starts_from": "a"}}
    values = {"base": run_file.name, "output": "study", "seeds": [1], "variants": variants}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
    return "study.yaml"


def test_a_study_that_has_not_begun_has_a_table_of_its_runs(study_file):
    result = run("study", "status", study_file)
    assert result.exit_code == 0 and "0 of 2 runs complete" in result.output
    found = json.loads(run("study", "status", study_file, "--json").output)["runs"]
    assert [(one["run"], one["starts_from"], one["training"]["state"]) for one in found] == [
        ("a-1", None, "not begun"),
        ("b-1", "a-1", "not begun"),
    ]


def test_jobs_are_lines_for_a_shell(study_file):
    lines = [line.split("\t") for line in run("study", "jobs", study_file).output.splitlines()]
    assert [(kind, name, after) for kind, name, _, after, _ in lines] == [
        ("cache", "cache of a-1", "-"),
        ("train", "a-1", "cache of a-1"),
        ("train", "b-1", "cache of a-1,a-1"),
        ("report", "report", "a-1,b-1"),
    ]
    assert json.loads(run("study", "jobs", study_file, "--json").output)[-1]["file"] == study_file


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("status", "no.yaml"), 2, "cannot read study file no.yaml: no such file or directory; see docs/studies.md"),
        (("report", "study.yaml"), 2, "not complete: a-1, b-1; run: lookonce study run study.yaml"),
        (("report", "study.yaml", "-o", "study.yaml"), 2, "study.yaml exists and is not a page of lookonce report"),
    ],
)
def test_mistakes_in_studies_are_explained(study_file, words, code, said):
    result = run("study", *words)
    assert result.exit_code == code and said in result.output


REFUSED = "is of type 'paligemma', which lookonce does not support; supported: qwen3_vl (Qwen3-VL), qwen3_vl_moe"


@pytest.fixture(scope="module")
def paligemma(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that says that its model is a PaliGemma."""
    folder = tmp_path_factory.mktemp("models") / "paligemma"
    shutil.copytree(sample / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "paligemma"}))
    return folder


@pytest.mark.parametrize("words", ["cache plan", "cache build", "train", "status", "check", "eval", "predict"])
def test_an_unsupported_model_is_refused_by_name_before_any_work(words, paligemma, make_run, tmp_path):
    made = make_run(model={"path": str(paligemma)})
    arguments = [str(tmp_path / "run.yaml")]
    Path(arguments[0]).write_text(made.to_yaml())
    if words in ("eval", "predict"):
        RunFolder(made.output).claim(made, {})
        RunFolder(made.output).adapter.mkdir()
        look_trained(RunFolder(made.output))
        arguments = [str(made.output), *(["--question", "Is there text?"] if words == "predict" else [])]
    result = run(*words.split(), *arguments)
    said = " ".join((result.stdout + result.stderr).split())
    assert result.exit_code == 1 and REFUSED in said, said
    assert "unexpected" not in said and not list(tmp_path.glob("caches/*/"))


@pytest.mark.parametrize("words", [("train",), ("cache", "build"), ("cache", "plan"), ("bench", "step")])
@pytest.mark.parametrize(
    ("key", "message"),
    [("data.train", "no records file at /nowhere/x; check the path"), ("model.path", "no model folder at /")],
)
def test_wrong_paths_are_found_before_the_slow_imports(run_file, monkeypatch, words, key, message):
    for name in ("torch", "lookonce.workflow", "lookonce.run.open", "lookonce.bench.step"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    done = run(*words, run_file, "--set", f"{key}=/nowhere/x")
    assert message in done.stderr and done.exit_code == 1
