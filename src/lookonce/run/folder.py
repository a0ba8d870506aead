"""The run folder: what a run writes, and the check that keeps two runs out of one folder.

docs/training.md lists the files. run.json is written first, and compared. trained.json is written after the adapter: a
folder that has it is trained. summary.json is written last: a folder that has it is finished. Of an adapter that
another program trained (`lookonce.save_run`) trained.json has no figures, and there is no environment.json. Besides,
there are:

claim.json          the process that trains or evaluates here; removed when it ends
predictions/        while a split is evaluated also SPLIT.partial-RANK.jsonl
answering/          one JSON file per split: how long it took to answer, and with how much memory
samples/            several answers to each question of a split, and their scores

One process at a time changes the folder. Its claim is taken before any input is read, and released when the process
ends; commands that only read do not ask for it. A process that was suspended until another took over notices before its
next write. With --restart the claim file moves away with the folder, and the name is claimed again; if another process
is faster in that moment, it keeps the folder, and this one is refused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from lookonce.cache.store.claims import using
from lookonce.claim_file import EXPIRY_S, IN_USE, FolderClaim, Process, holder, is_living, read_process_file
from lookonce.disk_space import free_bytes
from lookonce.environment import library_version, library_versions
from lookonce.errors import FolderInUse, RunFolderError
from lookonce.files import TEMPORARY_MARK, hash_file, is_full, read_json, read_object, write_json, write_text
from lookonce.run.config import RunFile, keys, read_run_file, with_absolute_paths
from lookonce.run.sections import RECORDED
from lookonce.settings import Difference, differences
from lookonce.text import listed, located, shell, shown, size
from lookonce.version import commit

CLAIM = "claim.json"
RECORD = "run.json"
"""The file that records the run; run.yaml beside it is a copy for people."""
CHECKSUMS = "checksums.json"
"""The file in a checkpoint that is empty until all others are on the disk; then it has the xxh3 of each."""
NUM_CHECKPOINTS = 2
"""Checkpoints that a training keeps; an older one is deleted once a newer one is written."""
STATE = "trainer_state.json"
"""Trainer's last file in a checkpoint, and the first that is deleted."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
"""The files that PEFT saves of an adapter: weights and shape."""
AGAIN = "train again with: lookonce train RUN.yaml --restart"
TRAIN = "lookonce train"
POLL_S = 0.1
Form = TypeVar("Form")


@dataclass(frozen=True)
class Record:
    """The content of run.json."""

    run: dict[str, Any]
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """Figures of a finished training: the content of trained.json."""

    num_steps: int
    first_step: int
    """The step from which the training was resumed; 0 if it was not interrupted."""
    num_samples: int
    num_too_long: int
    """Training records left out because they are longer than a pack or than `batch.max_tokens`."""
    seconds: float
    """Duration since `first_step`."""
    wait_share: float
    """Share of the step time since `first_step` that was spent waiting for data."""
    adapter: dict[str, str]
    """The xxh3 of each file of the adapter, by name."""
    startup_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each piece of work before `first_step`."""
    ended_early: str = ""
    """Why it ended before its last step (`train.patience`); empty if it did not."""


@dataclass(frozen=True)
class TrainedElsewhere:
    """The content of trained.json where another program trained the adapter: nothing is known of the training."""

    adapter: dict[str, str]
    elsewhere: Literal[True] = True


class RunFolder:
    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        """`adapter` is the folder of the adapter, if it is not the usual one."""
        self.folder, self._record = folder, folder / RECORD
        self.adapter = adapter or folder / "adapter"
        self.checkpoints = folder / "checkpoints"
        self.trained = folder / "trained.json"
        self.log = folder / "log.jsonl"
        self.drawn = folder / "drawn.jsonl"
        self.progress = folder / "progress.json"
        self.report = folder / "report.html"
        self.summary = folder / "summary.json"

    def predictions(self, split: str) -> Path:
        return self.folder / "predictions" / f"{split}.jsonl"

    def metrics(self, split: str) -> Path:
        return self.folder / "metrics" / f"{split}.json"

    def answering(self, split: str) -> Path:
        return self.folder / "answering" / f"{split}.json"

    def samples(self, split: str) -> Path:
        return self.folder / "samples" / f"{split}.jsonl"

    @classmethod
    def find(cls, path: Path) -> RunFolder:
        """The folder at `path`, the one in which a copy of the run file lies, or the output folder of a run file."""
        if path.is_file():
            return cls(path.parent if (path.parent / RECORD).exists() else read_run_file(path).output)
        return cls(path)

    @property
    def is_finished(self) -> bool:
        return self.summary.exists()

    @property
    def holds_work(self) -> bool:
        """Whether a training has started here."""
        return any(path.exists() for path in (self.log, self.checkpoints, self.adapter))

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that was written completely; its checksums are not compared."""
        return next(iter(self.complete_checkpoints()), None)

    def complete_checkpoints(self) -> list[Path]:
        """The checkpoints that were written completely, the newest first; their checksums are not compared."""
        complete = [path for path in self.checkpoints.glob("checkpoint-*") if step_of(path) >= 0 and is_complete(path)]
        return sorted(complete, key=step_of, reverse=True)

    def check(self, run: RunFile, identity: dict[str, Any]) -> None:
        """Check that the folder is free or already belongs to this run; a run without any step does not count.

        `identity` is all of `OpenRun.identity`, or the entries of it that are known.

        Raises:
            RunFolderError: it holds another run, or files that are not a run.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise RunFolderError(f"{self.folder} is a file; choose another `output`")
        if self.adapter.is_file():
            raise RunFolderError(f"{self.adapter} is a file, where the folder of the adapter belongs; move it away")
        if self.holds_work and self._record.exists():
            if differing := self.differences(run, identity):
                lines = [f"  {name}: this run {a!r}, that one {b!r}" for name, a, b in differing]
                raise RunFolderError(
                    "\n".join([f"{self.folder} holds another run, which differs in", *lines])
                    + "\nChoose another `output`, or move that run away and train this one with: "
                    "lookonce train RUN.yaml --restart"
                )
        elif self.folder.exists() and not self._record.exists():
            if any(path.name != CLAIM and TEMPORARY_MARK not in path.name for path in self.folder.iterdir()):
                raise RunFolderError(f"{self.folder} is not empty and does not hold a run; choose another `output`")

    def differences(self, run: RunFile, identity: dict[str, Any]) -> list[Difference]:
        """What tells this run from the recorded one, without what may change; the arguments are those of `check`.

        Of an adapter that another program trained the record has the options, and the length is not known.
        """
        ignored = {f"run.{name}" for name in run.keys_that_may_differ}
        if self.was_trained_elsewhere:
            ignored |= {"run.train.epochs", "run.train.steps"}
            ignored |= {f"run.{name}" for name in keys() if name.startswith("lora.")}
        recorded: dict[str, Any] = {"inputs": {name: self.recorded_inputs().get(name) for name in identity}}
        recorded["run"] = self.read_run().model_dump(mode="json")  # with defaults for newer keys
        differing = differences(_identity(run, identity), recorded)
        unused = () if run.train.objective == "grpo" else ("run.grpo.",)  # a mapping's own keys too
        return [one for one in differing if one[0] not in ignored and not one[0].startswith(unused)]

    def claim(self, run: RunFile, identity: dict[str, Any]) -> None:
        """Claim the folder for this run; raises RunFolderError if it holds another run or other files."""
        self.check(run, identity)
        run = with_absolute_paths(run)
        read = {name: value for name, value in identity.items() if value is not None}
        write_json(self._record, _identity(run, read))
        write_text(self.folder / "run.yaml", run.to_yaml())
        write_json(self.folder / "environment.json", asdict(Environment.this()))

    def check_adapter(self) -> None:
        """Raise RunFolderError if no training has ended here, or its adapter is missing, damaged or another one."""
        if not self.trained.exists():
            train = shell("lookonce", "train", self.folder / "run.yaml", "--resume")
            raise RunFolderError(f"{self.folder} holds no trained adapter; finish the training with: {train}")
        recorded, actual = self.read_trained().adapter, adapter_hashes(self.adapter)
        changed = [name for name in ADAPTER_FILES if actual.get(name) != recorded.get(name, "")]
        if changed:
            again = "save it into another `output` with lookonce.save_run" if self.was_trained_elsewhere else AGAIN
            raise RunFolderError(
                f"{self.adapter} is not the adapter that was trained in {self.folder}: missing, damaged or replaced: "
                f"{listed(changed)}; restore it from a copy, or {again}"
            )

    def recorded_inputs(self) -> dict[str, Any]:
        """The hashes of the recorded run's inputs; empty if there is none."""
        return read_form(self._record, Record, AGAIN).inputs if self._record.exists() else {}

    def check_inputs(self, identity: dict[str, Any]) -> None:
        """Raise RunFolderError if some of the run's inputs are no longer those of the training."""
        recorded = self.recorded_inputs()
        changed = [name for name, _, _ in differences(identity, {name: recorded.get(name) for name in identity})]
        if changed:
            raise RunFolderError(
                f"inputs of {self.folder} have changed since training ({', '.join(changed)}), so its adapter does not "
                "fit; restore them, or train again with: lookonce train RUN.yaml --restart"
            )

    def move_away(self) -> Path | None:
        """Rename the folder to make room for a new run; returns the new path, or None if it holds none."""
        if not self._record.exists():
            return None
        number = 1
        while (target := self.folder.with_name(f"{self.folder.name}.old-{number}")).exists():
            number += 1
        self.folder.rename(target)
        return target

    @property
    def was_trained_elsewhere(self) -> bool:
        """Whether another program trained the adapter (`lookonce.save_run`)."""
        return read_object(self.trained).get("elsewhere") is True

    def read_trained(self) -> Trained | TrainedElsewhere:
        """The figures of the training, if it took place here; raises RunFolderError if the file is broken."""
        if self.was_trained_elsewhere:
            return read_form(self.trained, TrainedElsewhere, AGAIN)
        return read_form(self.trained, Trained, AGAIN)

    def read_run(self) -> RunFile:
        """The run file that this folder belongs to; raises RunFolderError if this is not a run folder."""
        if not self._record.exists():
            raise RunFolderError(_no_run(self.folder))
        recorded = read_form(self._record, Record, AGAIN).run
        try:
            return RunFile.model_validate(recorded, context=RECORDED)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{self._record} is broken: {error}; {AGAIN}") from None


def _no_run(folder: Path) -> str:
    """What a folder is that holds no run."""
    if inside := sorted(path.parent.name for path in folder.glob(f"*/{RECORD}")):
        runs = listed([f"{folder}/{name}" for name in inside])
        return f"{folder} is not a run folder; name one of those in it: {runs}"
    if (folder / ADAPTER_FILES[1]).exists():
        return (
            f"{folder} holds an adapter and no run; make a run of it with: lookonce.save_run({str(folder)!r}, "
            "'run.yaml'), or name the run folder that it is in"
        )
    return f"{located(folder)} is not a run folder; make one with: lookonce train RUN.yaml"


def read_form(path: Path, form: type[Form], advice: str) -> Form:
    """The value in a JSON file of a run folder, in a form that pydantic knows, such as a dataclass.

    Fields of a later version that the form lacks are left out. `advice` says how the file is written again.

    Raises:
        RunFolderError: the file is missing, empty, cut, or has another form.
        OSError: it cannot be read.
    """
    try:
        return TypeAdapter(form).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        reason = "it is missing" if first["type"] == "missing" else first["msg"]
        problem = f"`{name}`: {reason}" if name else reason
    except FileNotFoundError:
        problem = "it is missing"
    except ValueError as error:
        problem = f"it is not JSON ({shown(str(error))})" if path.stat().st_size else "it is empty"
    raise RunFolderError(f"{path} is broken: {problem}; {advice}")


def adapter_hashes(folder: Path) -> dict[str, str]:
    """The xxh3 of each file of an adapter that can be read, by name."""
    hashes = {}
    for name in ADAPTER_FILES:
        with contextlib.suppress(OSError, ValueError):
            hashes[name] = hash_file(folder / name)
    return hashes


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written, from its name; -1 if this is not the name of one."""
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end, and not deleted in part; its files are not compared.

    The checksums are empty while it is written, and Trainer's state is deleted first.
    """
    checksums = checkpoint / CHECKSUMS
    try:
        return (checkpoint / STATE).exists() and not (checksums.exists() and checksums.stat().st_size == 0)
    except OSError:  # a name that is too long
        return False


def _identity(run: RunFile, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"run": run.model_dump(mode="json"), "inputs": inputs}


@dataclass(frozen=True)
class Environment:
    """Versions and hardware: the content of environment.json."""

    gpus: list[str] = field(default_factory=list)
    cpu_threads: int = 0
    libraries: dict[str, str | None] = field(default_factory=dict)
    commit: str | None = None

    @classmethod
    def this(cls) -> Environment:
        import torch

        return cls(
            gpus=[torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
            cpu_threads=torch.get_num_threads(),
            libraries=library_versions() | {"bitsandbytes": library_version("bitsandbytes")},
            commit=commit(),
        )


class RunClaim(FolderClaim):
    """This process's claim of a run folder, once `take` has got it; a context manager that releases it."""

    def __init__(self, folder: Path, command: str, expiry_s: float = EXPIRY_S) -> None:
        """`command` says what this process does: "lookonce train"."""
        super().__init__(folder / CLAIM, command, expiry_s)
        self.folder, self._command, self._is_new = folder, command, False
        self._caches = contextlib.ExitStack()

    def __exit__(self, *_: object) -> None:
        self._caches.close()
        super().__exit__()
        if self._is_new:
            with contextlib.suppress(OSError):  # not empty
                self.folder.rmdir()

    def use_cache(self, folder: Path) -> None:
        """Use a cache, if there is one, until this claim is released; raises CacheError if another process owns it."""
        if folder.is_dir():
            self._caches.enter_context(using(folder, self._command, self.expiry_s))

    def take(self, patience_s: float = 0.0) -> str:
        """Claim the folder, which is made if it does not exist; waits up to `patience_s` while another process uses it.

        Raises:
            RunFolderError: another process uses it, or it cannot be written to.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise RunFolderError(f"{self.folder} is a file; choose another `output`")
        self._is_new = not self.folder.exists()
        deadline = time.monotonic() + patience_s
        try:
            while (used_by := super().take()) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        except OSError as error:
            how = f"make room ({size(free_bytes(self.folder))} are free there)" if is_full(error) else "allow it"
            raise RunFolderError(
                f"cannot write to {self.folder} ({error.strerror}); {how}, or choose another `output`"
            ) from None
        if used_by:
            raise FolderInUse(f"{self.folder} {IN_USE} {used_by}; wait until it has ended, or stop it")
        return ""

    def check(self) -> None:
        """Raise RunFolderError if another process has taken the folder over, or it was moved."""
        if self.is_lost():
            by = f", now in use by {holder(self.path, self.expiry_s)}" if self.path.exists() else ""
            raise RunFolderError(
                f"{self.folder} was taken over by another process or moved while this one was suspended{by}; this "
                "process ends without writing to it"
            )

    def move_away(self) -> Path | None:
        """Move the run away and claim the folder again; returns the new path, or None; raises RunFolderError."""
        moved = RunFolder(self.folder).move_away()
        if moved:
            self.release_moved(moved / CLAIM)
            self.take()
        return moved


@contextlib.contextmanager
def claimed_around(output: Path, command: str) -> Iterator[None]:
    """Claim, within the block, the run folder around an output, if any; raises RunFolderError if it is in use."""
    around = next((folder for folder in output.absolute().parents if (folder / RECORD).exists()), None)
    if around is None:
        yield
        return
    with RunClaim(around, command, RunFolder(around).read_run().cache.claim_s) as owner:
        try:
            owner.take()
        except FolderInUse as error:
            raise FolderInUse(f"{output} cannot be written: {error}, or name a place outside of that folder") from None
        yield


def find_trainer(folder: Path, expiry_s: float) -> Process | None:
    """The living process that has claimed a run folder to train; None if there is none."""
    path = folder / CLAIM
    if not is_living(path, expiry_s):
        return None
    return read_process_file(path, lambda worker, command, **_: worker if command == TRAIN else None)
