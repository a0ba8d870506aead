"""The run folder: what a run writes, and the check that keeps two runs out of one folder.

run.yaml            the resolved run file
run.json            the same with hashes of everything the run read; written first
environment.json    versions and device
log.jsonl           one line per logging step
progress.json       progress of the training, rewritten every few seconds while it runs
checkpoints/        Trainer's checkpoints; TensorBoard's files in checkpoints/runs
adapter/            the trained adapter, as PEFT saves it
trained.json        figures of the training, written after the adapter: a folder that has it is trained
predictions/        one JSONL file per split
metrics/            one JSON file per split
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
from lookonce.run.paths import RECORDED

HARMLESS = {
    *("model.path", "model.revision", "data.train", "data.val", "data.test", "data.image_root"),
    *("data.format", "output"),
    *("cache.dir", "cache.check", "cache.shard_mb", "cache.stage", "cache.claim_s"),
    *("train.prefetch", "train.host_cache_gb", "train.logging_steps", "train.fsdp"),
    "train.cuda_graphs",
    *("train.save_total_limit", "train.tensorboard", "eval.split", "eval.max_new_tokens", "eval.batch_size"),
}
"""Keys that may change between a run and its resumption, because they do not change what is trained. Paths of models,
records and images are among them: their content is compared instead."""


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
    def find(cls, path: Path) -> RunFolder:
        """The folder at `path`, or the output folder of the run file at `path`."""
        return cls(read_run_file(path).output if path.is_file() else path)

    @property
    def is_finished(self) -> bool:
        return (self.folder / "summary.json").exists()

    @property
    def holds_work(self) -> bool:
        """Whether a training has started here."""
        return any(path.exists() for path in (self.log, self.checkpoints, self.adapter))

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint to resume from."""
        found = [path for path in self.checkpoints.glob("checkpoint-*") if _is_whole(path)]
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)

    def check(self, run: RunFile, identity: dict[str, Any]) -> None:
        """Check that the folder is free or already belongs to this run; a run without any step does not count.

        `identity` is all of `RunInputs.identity`, or the entries of it that are known.

        Raises:
            RunFolderError: it holds another run, or files that are not a run.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise RunFolderError(f"{self.folder} is a file; choose another `output`")
        if self.holds_work and self._record.exists():
            ignored = {f"run.{name}" for name in HARMLESS}
            recorded = json.loads(self._record.read_text())
            recorded["inputs"] = {name: recorded["inputs"].get(name) for name in identity}
            recorded["run"] = self.read_run().model_dump(mode="json")  # with defaults for newer keys
            found = differences(_identity(run, identity), recorded)
            lines = [f"  {name}: this run {a!r}, that one {b!r}" for name, a, b in found if name not in ignored]
            if lines:
                raise RunFolderError(
                    "\n".join([f"{self.folder} holds another run, which differs in", *lines])
                    + "\nChoose another `output`, or move that run away and start again with --restart"
                )
        elif self.folder.exists() and any(self.folder.iterdir()) and not self._record.exists():
            raise RunFolderError(f"{self.folder} is not empty and does not hold a run; choose another `output`")

    def claim(self, run: RunFile, identity: dict[str, Any]) -> None:
        """Claim the folder for this run.

        Raises:
            RunFolderError: it holds another run or other files.
        """
        self.check(run, identity)
        write_json(self._record, _identity(run, identity))
        write_text(self.folder / "run.yaml", run.to_yaml())
        write_json(self.folder / "environment.json", environment())

    def check_inputs(self, identity: dict[str, Any]) -> None:
        """Check that the run's inputs are still those of the training; `identity` may hold some of the entries.

        Raises:
            RunFolderError: they have changed.
        """
        recorded = json.loads(self._record.read_text())["inputs"]
        found = [name for name, _, _ in differences(identity, {name: recorded.get(name) for name in identity})]
        if found:
            raise RunFolderError(
                f"inputs of {self.folder} have changed since training ({', '.join(found)}), so its adapter does not "
                "fit; restore them, or train again with: lookonce train RUN.yaml --restart"
            )

    @property
    def _record(self) -> Path:
        return self.folder / "run.json"

    def move_away(self) -> Path | None:
        """Rename the folder to make room for a new run; returns the new path, or None if it holds none."""
        if not self._record.exists():
            return None
        number = 1
        while (target := self.folder.with_name(f"{self.folder.name}.old-{number}")).exists():
            number += 1
        self.folder.rename(target)
        return target

    def read_trained(self) -> Trained:
        """The figures of the training; the adapter must be trained."""
        return Trained(**json.loads(self.trained.read_text()))

    def read_run(self) -> RunFile:
        """The run file that this folder belongs to.

        Raises:
            RunFolderError: this is not a run folder.
        """
        try:
            recorded = without_removed_keys(json.loads(self._record.read_text())["run"])
            return RunFile.model_validate(recorded, context=RECORDED)
        except FileNotFoundError:
            raise RunFolderError(f"{self.folder} is not a run folder; make one with: lookonce train RUN.yaml") from None
        except (ValueError, KeyError) as error:
            raise RunFolderError(f"{self._record} is broken: {error}") from None


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written completely: Trainer's state is its last file."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True


def _identity(run: RunFile, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"run": run.model_dump(mode="json"), "inputs": inputs}


def environment() -> dict[str, Any]:
    """Versions and hardware, recorded with the run."""
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cpu_threads": torch.get_num_threads(),
        "libraries": library_versions(),
    }
