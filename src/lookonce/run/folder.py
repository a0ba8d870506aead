"""A run's folder: what a training leaves behind, and the guard that keeps two runs out of one folder.

run.yaml            the run file as resolved
run.json            the same with what was read, by content; written first
environment.json    versions and device
log.jsonl           one line a logging step
progress.json       how far the training is, written anew every few seconds while it runs
checkpoints/        Trainer's own, to resume from; TensorBoard's files in checkpoints/runs
adapter/            the trained adapter, as PEFT saves it
trained.json        what the training did, written after the adapter: nothing of it is left to do
predictions/        one JSONL a split
metrics/            one JSON a split
summary.json        written last: a folder that has it is finished
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.differences import differences
from lookonce.environment import library_versions
from lookonce.errors import RunFolderError
from lookonce.files import write_json, write_text
from lookonce.run.config import RunFile, read_run_file, without_removed_keys

HARMLESS = {
    *("model.path", "model.revision", "data.train", "data.val", "data.test", "data.image_root"),
    *("data.format", "output"),
    *("cache.dir", "cache.check", "cache.shard_mb", "cache.stage", "cache.claim_s"),
    *("train.prefetch", "train.host_cache_gb", "train.logging_steps", "train.fsdp"),
    "train.cuda_graphs",
    *("train.save_total_limit", "train.tensorboard", "eval.split", "eval.max_new_tokens", "eval.batch_size"),
}
"""Keys that may change between a run and its continuation: they do not change what is trained. Where models, records
and images lie does not matter because what is in them is compared."""


@dataclass(frozen=True)
class Trained:
    """What the training itself did: the content of trained.json."""

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


class RunFolder:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.adapter = folder / "adapter"
        self.checkpoints = folder / "checkpoints"
        self.trained = folder / "trained.json"
        self.log = folder / "log.jsonl"
        self.progress = folder / "progress.json"

    def predictions(self, split: str) -> Path:
        return self.folder / "predictions" / f"{split}.jsonl"

    def metrics(self, split: str) -> Path:
        return self.folder / "metrics" / f"{split}.json"

    @classmethod
    def find(cls, place: Path) -> RunFolder:
        """The folder at `place`, or that of the run file at `place`."""
        return cls(read_run_file(place).output if place.is_file() else place)

    @property
    def is_finished(self) -> bool:
        return (self.folder / "summary.json").exists()

    @property
    def holds_work(self) -> bool:
        """Whether anything was trained here."""
        return any(path.exists() for path in (self.log, self.checkpoints, self.adapter))

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint to resume from."""
        found = [path for path in self.checkpoints.glob("checkpoint-*") if _is_whole(path)]
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)

    def check(self, run: RunFile, identity: dict[str, Any]) -> None:
        """Check that the folder is free for this run or already its own; a run that never made a step does not count.

        `identity` is all of `Inputs.identity`, or the part of it that is known.

        Raises:
            RunFolderError: it holds another run, or files that are no run at all.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise RunFolderError(f"{self.folder} is a file; choose another `output`")
        if self.holds_work and self._record.exists():
            ignored = {f"run.{name}" for name in HARMLESS}
            recorded = json.loads(self._record.read_text())
            recorded["inputs"] = {name: recorded["inputs"].get(name) for name in identity}
            recorded["run"] = self.read_run().model_dump(mode="json")  # with the keys that are newer than it
            found = differences(_identity(run, identity), recorded)
            lines = [f"  {name}: this run {a!r}, that one {b!r}" for name, a, b in found if name not in ignored]
            if lines:
                raise RunFolderError(
                    "\n".join([f"{self.folder} holds another run; it differs in", *lines])
                    + "\nChoose another `output`, or move that run away and start anew with --restart"
                )
        elif self.folder.exists() and any(self.folder.iterdir()) and not self._record.exists():
            raise RunFolderError(f"{self.folder} is not empty and holds no run; choose another `output`")

    def claim(self, run: RunFile, identity: dict[str, Any]) -> None:
        """Make the folder this run's own.

        Raises:
            RunFolderError: it holds something else.
        """
        self.check(run, identity)
        write_json(self._record, _identity(run, identity))
        write_text(self.folder / "run.yaml", run.to_yaml())
        write_json(self.folder / "environment.json", environment())

    def check_inputs(self, identity: dict[str, Any]) -> None:
        """Check that what is read now is what was read in training: `identity` is all of it, or a part.

        Raises:
            RunFolderError: it has changed.
        """
        recorded = json.loads(self._record.read_text())["inputs"]
        found = [name for name, _, _ in differences(identity, {name: recorded.get(name) for name in identity})]
        if found:
            raise RunFolderError(
                f"what {self.folder} was trained with has changed since ({', '.join(found)}), so its adapter does not "
                "fit; put it back, or train anew with: lookonce train RUN.yaml --restart"
            )

    @property
    def _record(self) -> Path:
        return self.folder / "run.json"

    def move_away(self) -> Path | None:
        """Rename the folder so that a new run can take its name; gives the new name, or None if it holds no run."""
        if not self._record.exists():
            return None
        number = 1
        while (target := self.folder.with_name(f"{self.folder.name}.old-{number}")).exists():
            number += 1
        self.folder.rename(target)
        return target

    def read_trained(self) -> Trained:
        """What the training of a folder with a trained adapter did."""
        return Trained(**json.loads(self.trained.read_text()))

    def read_run(self) -> RunFile:
        """The run file that this folder was made with.

        Raises:
            RunFolderError: this is no run's folder.
        """
        try:
            return RunFile.model_validate(without_removed_keys(json.loads(self._record.read_text())["run"]))
        except FileNotFoundError:
            raise RunFolderError(f"{self.folder} is no run's folder; make one with: lookonce train RUN.yaml") from None
        except (ValueError, KeyError) as error:
            raise RunFolderError(f"{self._record} is broken: {error}") from None


def _is_whole(checkpoint: Path) -> bool:
    """Whether it was written to its end: Trainer's state is its last file."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True


def _identity(run: RunFile, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"run": run.model_dump(mode="json"), "inputs": inputs}


def environment() -> dict[str, Any]:
    """Versions and hardware, for whoever reads the numbers later."""
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cpu_threads": torch.get_num_threads(),
        "libraries": library_versions(),
    }
