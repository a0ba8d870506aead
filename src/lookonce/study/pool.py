"""The jobs of a study, run in processes of their own, one on each GPU or several on the CPU, until all have ended.

Of the jobs that can start, the one with the longest sequence of jobs behind it goes first (list scheduling by critical
path). Each is an ordinary command with its output in a log file. A process that has done one does the next
(runner.py); one whose job fails ends, the jobs that wait for it are skipped with the reason, and the others finish.
What another process uses is no failure: its job waits, and others go on. SIGTERM and SIGUSR1 are passed on to the
processes, which save their state and end with 75; nothing is started after that. If this process is killed, Linux sends
SIGTERM to its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from types import FrameType

from lookonce.claim_file import IN_USE
from lookonce.errors import Stopped, explain_os_error
from lookonce.signals import handle_signals
from lookonce.text import Notify, duration, shown


@dataclass(frozen=True)
class Job:
    """A command that a study runs."""

    name: str
    command: tuple[str, ...]
    """Arguments of lookonce; the last one is the run file."""
    log: Path
    cost: float = 0
    """How much work it is, in any unit: the samples that are trained on."""
    after: tuple[str, ...] = ()
    """The jobs that must have succeeded before."""
    is_done: Callable[[], bool] = lambda: False
    """Whether there is nothing left to do; asked right before it would be started."""


def by_urgency(jobs: Sequence[Job]) -> list[Job]:
    """The jobs, those with the longest sequence of jobs that wait for them first; equal ones stay in order."""
    costs = {job.name: job.cost for job in jobs}
    followers = {name: [job.name for job in jobs if name in job.after] for name in costs}

    def length(name: str) -> float:
        return costs[name] + max(map(length, followers[name]), default=0.0)

    return sorted(jobs, key=lambda job: -length(job.name))


INTERVAL_S = 0.2
RETRY_S = 20.0
"""How long a job waits before it tries again to get what another process uses."""
ERROR = "Error: "
"""The beginning of a command's error message."""
LONGEST_REASON = 500
"""Characters of an error message that are repeated, so that the command in its advice is whole."""
PR_SET_PDEATHSIG = 1
"""An option of Linux's prctl: the signal that a process gets when the one that started it ends."""


class Runner:
    """A process that runs the commands of jobs one after another, until one fails."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        """`log` gets what the process prints before its first command."""
        self._commands, theirs = Pipe()
        safe_path = [] if os.getcwd() in sys.path else ["-P"]  # it imports from the folders that this process does
        with log.open("ab") as file, theirs:
            self._process = subprocess.Popen(
                [sys.executable, *safe_path, "-m", "lookonce.runner", str(theirs.fileno())],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is passed on once, and not also sent by the terminal
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def begin(self, job: Job) -> bool:
        """Run the command of a job; false if the process has ended."""
        with contextlib.suppress(OSError):
            self._commands.send((job.command, str(job.log)))
            return self._process.poll() is None
        return False

    def poll(self) -> int | None:
        """The exit code of the command; None while it runs."""
        code = self._process.poll()  # first, as a process may end right after its message
        with contextlib.suppress(EOFError, OSError):
            if self._commands.poll():
                self._commands.recv()
                return 0
        return code

    def send_signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Let the process end, if no command runs, as there are no more."""
        self._commands.close()

    def wait(self) -> None:
        self._process.wait()


@dataclass(eq=False)
class Slot:
    """A place for one process at a time."""

    name: str = ""
    """The device, such as "GPU 0"; empty on the CPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    runner: Runner | None = None
    """The process that has run the last job here."""

    def close(self) -> None:
        """Let the process end, which runs nothing."""
        if self.runner:
            self.runner.close()
        self.runner = None


def slots(gpus: Sequence[str], num_parallel: int | None) -> list[Slot]:
    """A slot for each GPU, or `num_parallel` that share the GPUs; without GPUs `num_parallel`, or one."""
    number = num_parallel or len(gpus) or 1
    if not gpus:
        return [Slot() for _ in range(number)]
    threads = str(max((os.cpu_count() or 1) // number, 1))
    usual = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}  # else each process takes all cores
    names = [gpus[index % len(gpus)] for index in range(number)]
    return [Slot(f"GPU {name}", {"CUDA_VISIBLE_DEVICES": name} | usual) for name in names]


@dataclass
class Running:
    """A job whose process runs."""

    job: Job
    slot: Slot
    runner: Runner
    began: float


@dataclass
class Outcome:
    """How the jobs ended, by name."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """The reasons."""
    skipped: dict[str, str] = field(default_factory=dict)
    """The reasons: what they waited for has failed."""
    stopped: list[str] = field(default_factory=list)
    """Jobs that were asked to stop, or that waited for these."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 1 if a job failed, 75 if one is unfinished."""
        return 1 if self.failed else Stopped.exit_code if self.stopped else 0

    def text(self) -> str:
        """A line for each job that failed, was skipped or was stopped."""
        lines = [f"{name} failed: {reason}" for name, reason in self.failed.items()]
        lines += [f"{name} is skipped, because {reason}" for name, reason in self.skipped.items()]
        lines += [f"{name} is unfinished: run the same command again" for name in self.stopped]
        return "\n".join(lines)


class Pool:
    def __init__(self, places: Sequence[Slot], notify: Notify, describe: Callable[[str], str]) -> None:
        """`describe` says in a few words what a job that has ended has achieved."""
        self._free, self._notify, self._describe = list(places), notify, describe
        self._running: list[Running] = []
        self._runners: list[Runner] = []
        """All that were started."""
        self._waiting: list[Job] = []
        self._signal: signal.Signals | None = None
        self._signals: list[int] = []
        """Signals that have come and are not passed on yet."""
        self._tried: dict[str, float] = {}
        """When jobs were last refused, because another process used what they write."""
        self.outcome = Outcome()

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Run all jobs; raises Stopped, once all processes have ended, if a signal asked this one to stop."""
        self._waiting = by_urgency(jobs)
        with handle_signals(self._record):
            try:
                self._run()
            except BaseException:
                self._send(signal.SIGINT)
                raise
            finally:
                for runner in self._runners:
                    runner.close()
                for runner in self._runners:
                    runner.wait()
        if self._signal:
            raise Stopped(
                f"stopped by {self._signal.name}; run the same command again to continue with what is missing"
            )
        return self.outcome

    def _run(self) -> None:
        while self._waiting or self._running:
            self._pass_on()
            self._collect()
            self._skip()
            self._start()
            if self._waiting or self._running:
                time.sleep(INTERVAL_S)

    def _start(self) -> None:
        """Start what can be started, the most urgent first."""
        for job in list(self._waiting):
            if not self._free or not set(job.after) <= set(self.outcome.done) or self._is_too_soon(job):
                continue
            if job.is_done():
                self.outcome.done.append(job.name)
            else:
                slot = next((slot for slot in self._free if slot.runner), self._free[0])
                try:
                    self._running.append(self._begin(job, slot))
                    self._free.remove(slot)
                except OSError as error:  # such as no room for its log
                    self.outcome.failed[job.name] = reason = explain_os_error(error)
                    self._notify(f"{job.name}: failed: {reason}")
            self._waiting.remove(job)
        for slot in self._free if not self._waiting else ():
            slot.close()  # an idle process has memory that those on the same GPU may need

    def _is_too_soon(self, job: Job) -> bool:
        """Whether a job has just been refused, because another process used what it writes."""
        return time.monotonic() - self._tried.get(job.name, -RETRY_S) < RETRY_S

    def _begin(self, job: Job, slot: Slot) -> Running:
        on = f" on {slot.name}" if slot.name else ""
        self._notify(f"{job.name}: started{on}, log: {job.log}")
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.touch()
        if not (slot.runner and slot.runner.begin(job)):
            slot.runner = Runner(slot.environment, job.log)
            self._runners.append(slot.runner)
            slot.runner.begin(job)
        return Running(job, slot, slot.runner, time.monotonic())

    def _collect(self) -> None:
        """Note the processes that have ended, and free their slots."""
        for running, code in [(running, running.runner.poll()) for running in self._running]:
            if code is None:
                continue
            self._running.remove(running)
            self._free.append(running.slot)
            if code:
                running.slot.close()  # its process has ended
            name, took = running.job.name, duration(time.monotonic() - running.began)
            if code == 0:
                self.outcome.done.append(name)
                self._notify(f"{name}: done in {took}{self._describe(name)}")
            elif code == Stopped.exit_code or (self._signal and code == -self._signal):
                self.outcome.stopped.append(name)
                self._notify(f"{name}: stopped after {took}; continue it with the same command")
            elif running.job.is_done():  # by another process, which used the folder when this one tried to
                self.outcome.done.append(name)
                self._notify(f"{name}: done by another process{self._describe(name)}")
            elif IN_USE in (error := _last_error(running.job.log)):
                if name not in self._tried:
                    self._notify(f"{name}: {error}; this study waits for it, other jobs continue")
                self._tried[name] = time.monotonic()
                self._waiting.append(running.job)
            else:
                self.outcome.failed[name] = reason = _reason(code, error, running.job.log)
                self._notify(f"{name}: failed after {took}: {reason}")

    def _skip(self) -> None:
        """Take out the jobs that wait for one that failed, was skipped or was stopped."""
        lost = self.outcome.failed.keys() | self.outcome.skipped.keys()
        for job in list(self._waiting):
            if name := next((name for name in job.after if name in lost), None):
                why = "failed" if name in self.outcome.failed else "is skipped"
                self.outcome.skipped[job.name] = f"{name} {why}"
                self._notify(f"{job.name}: skipped, because {name} {why}")
                lost |= {job.name}
                self._waiting.remove(job)
            elif any(name in self.outcome.stopped for name in job.after):
                self.outcome.stopped.append(job.name)
                self._waiting.remove(job)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        self._signals.append(number)

    def _pass_on(self) -> None:
        """Pass on the signals that have come; after the first one nothing is started."""
        while self._signals:
            number = signal.Signals(self._signals.pop(0))
            self._notify(f"{number.name} sent to the jobs; waiting for {len(self._running)} of them to save and end")
            self._send(number)
        if self._signal:
            self.outcome.stopped += [job.name for job in self._waiting]
            self._waiting.clear()

    def _send(self, number: int) -> None:
        for running in self._running:
            running.runner.send_signal(number)


def _reason(code: int, error: str, log: Path) -> str:
    """Why a process failed: the signal that killed it, or its last error."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}, see {log}"
    return f"{shown(error, LONGEST_REASON) or f'exit code {code}'}, see {log}"


def _last_error(log: Path) -> str:
    """The last error message in a log, all its lines in one; empty if there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    last = max((number for number, line in enumerate(lines) if line.startswith(ERROR)), default=len(lines))
    return " ".join(line.strip() for line in lines[last:]).removeprefix(ERROR)


def _end_with_parent() -> None:
    """Runs in the child: let Linux send it SIGTERM when this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
