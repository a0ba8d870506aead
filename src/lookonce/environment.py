"""The process and its machine: library versions, device, host, rank, and how this program was called.

Design: torch is imported inside the functions that need it, so that commands that only read start without it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from lookonce.errors import UsageError
from lookonce.version import __version__

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 1_000_000_000
"""Models with fewer bytes of weights get one CPU thread: the sample's has 9 MB, the smallest Qwen3-VL 4.3 GB."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user sets the number of CPU threads."""
MANY_OBJECTS = 1_000_000
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for each process that it starts."""
MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""The number of processes that MPI has started, which libraries also follow."""
UNUSED = ("datasets", "pandas", "scipy", "sklearn")
"""Libraries that transformers imports where they are installed, to recognise their objects, which are not used here."""
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors", "numpy", "pillow")


def library_versions() -> dict[str, str | None]:
    """Versions by name; None for a library that is not installed."""
    return {"lookonce": __version__} | {name: library_version(name) for name in LIBRARIES}


@functools.cache
def library_version(name: str) -> str | None:
    """The version of a library; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@functools.cache
def machine() -> str:
    """An identifier of this boot of this machine and of the process namespace: containers do not see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def rank() -> int:
    """The number of this process among those that torchrun started, from 0 on; 0 without torchrun."""
    return _from_variable("RANK", 0)


def num_ranks() -> int:
    """How many processes torchrun started on all machines; 1 without torchrun."""
    return _from_variable("WORLD_SIZE", 1)


def local_rank() -> int:
    """The number of this process among those of this machine, which is the number of its GPU."""
    return _from_variable("LOCAL_RANK", 0)


def num_cores() -> int:
    """CPU cores that this process may use; those of a machine are divided among the processes that torchrun started."""
    return max(len(os.sched_getaffinity(0)) // _from_variable("LOCAL_WORLD_SIZE", 1), 1)


def _from_variable(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not re.fullmatch("[1-9][0-9]{0,8}" if name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", *MPI) else "[0-9]{1,9}", value):
        meaning = "the number of processes" if name.endswith("WORLD_SIZE") else "a number of a process"
        raise UsageError(f"{name}={value!r} in the environment is not {meaning}; run: unset {name}")
    return int(value)


def launch_note() -> str:
    """What to know of variables that torchrun sets, or that a job system has left in the environment; empty if nothing.

    Libraries join a process group if they find some of these variables, and fail, or wait for the others, if nothing
    has started these. So a process has all of them, or runs alone.

    Raises:
        UsageError: some are set and others are not, or their values do not fit together; says how to unset them.
    """
    variables = {name: os.environ[name] for name in (*LAUNCH, *MPI) if name in os.environ}
    numbers = {name: _from_variable(name, 0) for name in variables if name != "MASTER_ADDR"}
    missing = [name for name in LAUNCH if name not in variables]
    size = numbers.get("WORLD_SIZE", max((numbers[name] for name in MPI if name in numbers), default=1))
    named = f"{', '.join(f'{name}={value}' for name, value in variables.items())} in the environment"
    alone = f"to run as one process without it: unset {' '.join(variables)}"
    together = "to use several GPUs: torchrun --nproc-per-node NUMBER -m lookonce ..."
    if missing and (size > 1 or "LOCAL_RANK" in variables or numbers.get("RANK")):
        raise UsageError(
            f"{named}, as torchrun sets it for each of several processes, but without {', '.join(missing)}: left by a "
            f"container, a job system or another program; {alone}; {together}"
        )
    if missing:
        if any(name in variables for name in LAUNCH):
            return f"{named} has no effect, because torchrun did not start this process; {alone}"
        tasks = os.environ.get("SLURM_NTASKS", "1")
        if tasks == "1" or "SLURM_STEP_ID" in os.environ:
            return ""
        return (
            f"SLURM_NTASKS={tasks} in the environment, but srun did not start this process: it runs alone; {together}"
        )
    if not max(numbers["RANK"], numbers["LOCAL_RANK"]) < size:
        raise UsageError(f"{named} do not fit together: RANK and LOCAL_RANK are below WORLD_SIZE; {alone}; {together}")
    if size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ and rank() == 0:
        return f"waiting for {size - 1:,} more of {size:,} processes, because of {named}; {alone}"
    return ""


def best_device() -> torch.device:
    """The GPU of this process, or the CPU if there is no GPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """The GPU's name, or "CPU"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def gpu_gb() -> float | None:
    """The memory of this process's GPU in GB (10^9 bytes); None without a GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else None


def limit_cpu_threads(model_folder: Path) -> None:
    """On a CPU, compute a small model with one thread, unless the user has set a number of threads.

    Its matrix products are so short that waiting for other threads costs more than it gains: 200 steps of the sample's
    model took 6 s with one thread, 14 s with two, and 131 s with two while a second training ran. The number depends on
    the model alone, since it may change how sums are rounded: so all machines compute the same bits.
    """
    import torch

    if torch.cuda.is_available() or any(os.environ.get(name) for name in THREADS):
        return
    if sum(file.stat().st_size for file in model_folder.glob("*.safetensors")) < SMALL_BYTES:
        torch.set_num_threads(1)


def bytecode_note() -> str | None:
    """What to change if Python keeps no bytecode of libraries: each process compiles them, in 10 s on some machines."""
    import torch

    kept = torch.__spec__.cached if torch.__spec__ else None
    if kept is None or os.path.exists(kept):
        return None
    change = "PYTHONDONTWRITEBYTECODE is set; unset it"
    if not sys.dont_write_bytecode:
        change = f"{os.path.dirname(kept)} cannot be written; set PYTHONPYCACHEPREFIX to a folder that can"
    return f"libraries load slowly, because Python keeps no bytecode of them: {change}"


@contextlib.contextmanager
def one_cpu_thread() -> Iterator[None]:
    """Compute on a CPU with one thread within the block, for many small tensors.

    Each operation waits for its slowest thread, which takes milliseconds while other processes start: a 2B and the 392
    matrices of its adapter took 2.1 to 2.7 s to load with 16 threads and 1.0 s with 2, beside the compiler's processes.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def program() -> str:
    """The command that calls this program again: its name, or its path if the name is not on the PATH."""
    on_path, mine = shutil.which("lookonce"), Path(sys.argv[0])
    if mine.name != "lookonce" or (on_path and mine.resolve() == Path(on_path).resolve()):
        return "lookonce"
    return shorten(str(mine.absolute()))


def shorten(path: str) -> str:
    """The path relative to the working directory, if it is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause Python's search for cycles while many objects are made: it would look at all of them again and again.

    If they are very many, it never looks at them later either: a search through a million records takes 2 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY_OBJECTS:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def fewer_imports() -> Iterator[None]:
    """Import torch and transformers within the block, for a command: 6 s become 4.

    transformers believes that libraries which are not used are not installed, and Python does not search the imported
    objects for cycles, within the block or later.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    from transformers import utils
    from transformers.utils import import_utils

    names = [f"is_{library}_available" for library in UNUSED]
    before = [
        (module, name, vars(module)[name]) for module in (utils, import_utils) for name in vars(module).keys() & names
    ]
    try:
        for module, name, _ in before:
            setattr(module, name, lambda: False)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        gc.freeze()
        if was_enabled:
            gc.enable()
