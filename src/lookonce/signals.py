"""Signals that ask a process to stop, and how every command ends after one.

SIGTERM, SIGUSR1 (which Slurm sends before a time limit or a preemption) and SIGHUP (a closed terminal or ssh session)
end a command with exit code 75 (EX_TEMPFAIL): not finished, run me again. Ctrl-C ends it with 130. Under nohup SIGHUP
is ignored, and stays so. What a build and a training finish first is in cache/build/worker.py and
train/loop/distributed.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from lookonce.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
RESUME = "run the same command again to resume"
GRACE_S = 1.0
"""How long a library that waits has to hand a signal on to its handler."""
Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def handle_signals(handler: Handler, *more_signals: signal.Signals) -> Iterator[None]:
    """Call `handler` for these signals, and for `more_signals`, within the block.

    Does nothing outside the main thread, as Python requires.
    """
    handled = {*SIGNALS, *more_signals} if threading.current_thread() is threading.main_thread() else set()
    for number in (signal.SIGHUP, signal.SIGINT):  # ignored by nohup and by a script's `&`: stays so
        handled -= {number} if signal.getsignal(number) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def workers_without_signals() -> Iterator[None]:
    """Processes that are started within the block do not get the signals that a terminal or Slurm sends to a group.

    Their parent gets these and ends them; otherwise each would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def exit_on_signal(advice: Callable[[], str]) -> Iterator[None]:
    """Within the block, end the program at once on a signal or on Ctrl-C; `advice` ends the message."""
    process_id = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process_id:  # a worker that was forked within the block; its parent ends it
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt(f"interrupted; {advice()}")
        raise Stopped(f"stopped by {signal.Signals(number).name}; {advice()}")

    with handle_signals(stop, signal.SIGINT):
        yield


@contextlib.contextmanager
def waiting_for_processes() -> Iterator[None]:
    """Within the block, end the program soon after a signal, also while PyTorch waits for other processes.

    It waits in C++, for up to days, and Python runs a handler only when that has ended; it tells a socket at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiving, sending = socket.socketpair()
    has_ended = threading.Event()

    def stop() -> None:
        number = next(iter(receiving.recv(1)), 0)
        if number in (*SIGNALS, signal.SIGINT) and not has_ended.wait(GRACE_S):
            name = signal.Signals(number).name
            waited = f"stopped by {name} while waiting for other processes"
            print(f"Error: {waited}; run the same command again", file=sys.stderr)
            sys.stderr.flush()
            os._exit(130 if number == signal.SIGINT else Stopped.exit_code)

    with receiving, sending:
        sending.setblocking(False)
        before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=stop, name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            signal.set_wakeup_fd(before)
            sending.close()
            thread.join()
