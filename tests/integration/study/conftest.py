"""Commands of `lookonce study` on study files in a folder, with the processes of the pool forked from theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:  # pytest rewrites the modules of `support` only if no conftest has imported them
    from support.processes import Preloaded, Process

STUDY = """
import os, subprocess, sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
import lookonce.study.pool as pool
from lookonce import runner
from lookonce.cli import main

class Forked:
    '''A process of the pool, forked from this one, which has imported everything already.'''

    def __init__(self, command, env, stdin, stdout, stderr, pass_fds, start_new_session, preexec_fn):
        assert command[-3:-1] == ["-m", "lookonce.runner"] and start_new_session
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            os.setsid()
            preexec_fn()
            for descriptor in (1, 2):
                os.dup2(stdout.fileno(), descriptor)
            for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *pass_fds}:
                try:
                    os.close(descriptor)
                except OSError:
                    pass  # the one that listed them
            code = 99
            try:
                runner.serve(Connection(int(command[-1])))
                code = 0
            except SystemExit as end:
                code = end.code
            finally:
                os._exit(code)

    def poll(self):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number):
        os.kill(self.pid, number)

pool.subprocess, pool.INTERVAL_S, pool.RETRY_S = SimpleNamespace(**vars(subprocess) | {"Popen": Forked}), 0.02, 1
main(["study", *sys.argv[1:]])
"""


@dataclass
class Study:
    """Runs `lookonce study` on a study file in a folder."""

    preloaded: Preloaded
    folder: Path
    base: str
    number: int = 0
    """How many commands were started; each has an output of its own."""

    def write(self, name: str, variants: dict, baseline: str = "plain") -> Path:
        (self.folder / "base.yaml").write_text(self.base)
        study = {
            "base": "base.yaml",
            "seeds": [1],
            "output": name,
            "variants": variants,
            "compare": {"baseline": baseline},
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
        return self.folder / name

    def start(self, *words: str) -> Process:
        self.number += 1
        (self.folder / f"started{self.number}.err").touch()  # read before the process has begun to write
        return self.preloaded.start(STUDY, *words, folder=self.folder, name=f"started{self.number}")

    def __call__(self, *words: str, code: int = 0) -> str:
        process = self.start(*words)
        assert process.wait() == code, process.error
        return process.out


@pytest.fixture
def study_of(preloaded: Preloaded, tmp_path: Path) -> Callable[[str], Study]:
    """Studies with this base run file."""
    return lambda base: Study(preloaded, tmp_path, base)
