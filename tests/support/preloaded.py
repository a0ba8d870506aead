"""A program that imports everything once, then forks a process for each program that it is asked to run.

A new Python process takes 5 CPU-seconds to import torch and transformers; a forked one starts in milliseconds. Reads
requests from stdin, a JSON object a line, and answers each with a line:

    {"source": ..., "arguments": [...], "folder": ..., "environment": {...}, "name": ...}   the new process's id
    {"poll": process_id}                                                                    its exit code, or null

A process runs in `folder`, in its own process group, and writes to NAME.out and NAME.err there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import matplotlib.backends.backend_svg
import matplotlib.figure  # noqa: F401

import lookonce.cache.build.worker
import lookonce.cli
import lookonce.commands.cache
import lookonce.commands.train
import lookonce.workflow  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(poll(request["poll"]) if "poll" in request else start(request)), flush=True)


def start(request: dict[str, Any]) -> int:
    """The id of a new process that runs the requested program."""
    if process_id := os.fork():
        return process_id
    code = 1
    try:
        code = run(request)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(request: dict[str, Any]) -> int:
    os.setsid()
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    for descriptor, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{request['name']}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = [request["name"], *request["arguments"]]
    try:
        exec(compile(request["source"], request["name"], "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def poll(process_id: int) -> int | None:
    ended, status = os.waitpid(process_id, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    main()
