"""Signals, and processes of the integration tests, which start from one that has imported everything already."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NOTICE, WARNING = signal.SIGUSR1, signal.SIGTERM
"""Signals that leave time, and that do not."""


def send(*numbers: signal.Signals) -> None:
    """Send signals to this process."""
    for number in numbers:
        os.kill(os.getpid(), number)


def wait_until(happened: Callable[[], object], timeout_s: float = 60) -> None:
    """Wait for something that another process or thread does."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen in {timeout_s} s"
        time.sleep(0.005)


@pytest.fixture
def restored_handlers() -> Iterator[None]:
    """However a test ends, the handlers of signals that were there before are restored."""
    before = [signal.signal(number, signal.SIG_IGN) for number in (NOTICE, WARNING)]
    yield
    after = [signal.signal(number, handler) for number, handler in zip((NOTICE, WARNING), before, strict=True)]
    assert after == [signal.SIG_IGN, signal.SIG_IGN]


@dataclass
class Process:
    """A process that `Preloaded` has started."""

    pid: int
    folder: Path
    name: str
    ask: Callable[[dict[str, Any]], Any]
    code: int | None = None
    """The exit code, once it is known."""

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.ask({"poll": self.pid})
        return self.code

    @property
    def out(self) -> str:
        return (self.folder / f"{self.name}.out").read_text()

    @property
    def error(self) -> str:
        return (self.folder / f"{self.name}.err").read_text()

    def wait(self, timeout_s: float = 120) -> int:
        """The exit code. A process that does not end in time is killed with its process group."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                pytest.fail(f"{self.name} did not end in {timeout_s} s: {self.error}")
            time.sleep(0.02)
        return code

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 60) -> None:
        """Wait for something while this process runs."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.poll() is None and time.monotonic() < deadline, self.error
            time.sleep(0.02)


class Preloaded:
    """Starts processes that have imported torch and transformers already (preloaded.py)."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("preloaded.py"))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def start(self, source: str, *arguments: str, folder: Path, name: str = "program", **environment: str) -> Process:
        """Run Python source in a new process, in `folder`; its output goes to NAME.out and NAME.err there."""
        request = {"source": source, "arguments": arguments, "folder": str(folder), "name": name}
        pid = self._ask(request | {"environment": environment})
        return Process(pid, folder, name, self._ask)

    def start_ranks(self, number: int, source: str, *arguments: str, folder: Path) -> list[Process]:
        """Run it in processes that work together on the CPU, started as by srun: by torchrun's variables."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        common = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if number > 1 else {} for rank in range(number)]
        return [
            self.start(source, *arguments, folder=folder, name=f"rank{rank}", **variables)
            for rank, variables in enumerate(ranks)
        ]

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    found = Preloaded()
    yield found
    found.close()


PAUSED = """
import os, sys, time
from pathlib import Path
from pkgutil import resolve_name
from lookonce.cli import main

owner, _, name = sys.argv[1].rpartition(".")
real = getattr(resolve_name(owner), name)

def paused(*args, **options):
    Path(f"paused-{os.getpid()}").touch()
    while not Path("go").exists():
        time.sleep(0.02)
    return real(*args, **options)

setattr(resolve_name(owner), name, paused)
main(sys.argv[2:])
"""
"""Runs a command that stops at a function until there is a file `go`."""


@dataclass
class Paused:
    """Starts commands in processes of their own, each of which stops at a function."""

    preloaded: Preloaded
    folder: Path

    def __post_init__(self) -> None:
        self.processes: list[Process] = []

    def __call__(self, at: str, *words: str) -> Process:
        """A process that runs `lookonce *words` in the folder and has come to the function `at` (module:name)."""
        process = self.preloaded.start(PAUSED, at, *words, folder=self.folder, name=f"paused{len(self.processes)}")
        self.processes.append(process)
        process.wait_until((self.folder / f"paused-{process.pid}").exists)
        return process

    def go_on(self) -> None:
        """Let all of them continue."""
        (self.folder / "go").touch()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def paused(preloaded: Preloaded, tmp_path: Path) -> Iterator[Paused]:
    found = Paused(preloaded, tmp_path)
    yield found
    found.kill()
