"""Every command that is printed can be copied into a shell, whatever the names of files and folders."""

from __future__ import annotations

import html
import re
import shlex
import shutil
from pathlib import Path

import pytest
from support.rows import run

from lookonce.datasets.prepare.run import next_steps
from lookonce.errors import UsageError
from lookonce.study.pool import Job
from lookonce.study.run import line_of

pytestmark = [
    pytest.mark.usefixtures("no_fsync"),
    pytest.mark.guarantee("Printed commands can be copied into a shell, whatever files are called."),
]

NAME = "my run; touch pwned"
COMMAND = re.compile(r"(?:lookonce [a-z]|gunzip |namei -l |export [A-Z]+=)[^`<]*")


@pytest.fixture
def place(sample, built, make_run, tmp_path, monkeypatch) -> Path:
    """A folder in which everything has a name that would run something else: run file, records, model, run folder."""
    folder = tmp_path / NAME
    folder.mkdir()
    monkeypatch.chdir(folder)
    shutil.copytree(sample, f"sample of {NAME}", ignore=shutil.ignore_patterns("images", "model"))
    for name in ("images", "model"):
        (folder / f"sample of {NAME}" / name).symlink_to(sample / name)
    data = {split: f"sample of {NAME}/{split}.jsonl" for split in ("train", "val", "test")}
    model, cache = {"path": f"sample of {NAME}/model"}, {"dir": str(built.folder.parent)}
    made = make_run(model=model, data=data, cache=cache, train={"steps": 1}, output=f"output of {NAME}")
    Path(f"{NAME}.yaml").write_text(made.to_yaml())
    return folder


def said_by(*words: str) -> str:
    result = run(*words)
    assert result.exit_code in (0, 1, 2) and "Traceback" not in result.output, result.output
    return result.stdout + result.stderr


def check_commands(text: str, least: int = 1) -> None:
    """Check that no printed command has a name outside of quotes; at least this many commands are printed."""
    found = [match[0].replace("…", "") for match in map(COMMAND.search, text.splitlines()) if match]
    with_names = [command for command in found if "touch" in command]
    assert len(with_names) >= least, text
    for command in with_names:
        tokens = list(shlex.shlex(command, posix=True, punctuation_chars=True))
        assert not {"touch", "pwned", "run;"} & set(tokens), command
        assert any("; touch pwned" in token for token in tokens), command


def test_messages_of_commands(place, sample, with_mode):
    run_file, output, records = f"{NAME}.yaml", f"output of {NAME}", f"sample of {NAME}/train.jsonl"
    other = ("--set", "cache.dtype=bfloat16", "--set", f"cache.dir=caches of {NAME}")
    check_commands(said_by("check", run_file, *other))
    check_commands(said_by("status", run_file))
    check_commands(said_by("train", run_file, *other))
    check_commands(said_by("cache", "plan", run_file, *other, "--write", "--pilot", "0"))
    check_commands(said_by("train", run_file))  # the question to ask next
    check_commands(said_by("status", run_file))
    check_commands(said_by("status", output))
    check_commands(said_by("train", run_file, "--set", "train.seed=9"), least=0)
    check_commands(said_by("compare", output, f"{output}/run.yaml", "--split", "test"))
    check_commands(said_by("export", output, "--to", "medico", "--split", "train", "-o", "x.json"))
    check_commands(said_by("eval", run_file, "--set", "output=x"))
    check_commands(
        said_by("init", f"new {NAME}.yaml", "--model", f"sample of {NAME}/model", "--train", records, "--yes")
    )
    check_commands(said_by("sample", f"new {NAME}"), least=3)
    Path(records).write_text("{broken\n" + Path(records).read_text())
    check_commands(said_by("check", run_file))
    check_commands(said_by("fetch", run_file), least=0)
    with_mode(Path(records), 0o000)
    check_commands(said_by("train", run_file, "--restart"))
    page = Path(output, "report.html").read_text()
    check_commands("\n".join(html.unescape(page).replace("<", "\n<").splitlines()))


def test_lines_for_schedulers_and_run_files(tmp_path):
    steps = next_steps(tmp_path / NAME, {"split": {"records": {"train": 3, "val": 1}}})
    check_commands(steps)
    assert f'train: "{tmp_path / NAME}/train.jsonl"' in steps
    with pytest.raises(UsageError, match="has a tab or a line break"):
        line_of(Job("a-1", ("train", "a\tb.yaml"), Path("log")))
