"""The trackers of `train.track`: TensorBoard, W&B and MLflow, through transformers' own callbacks.

Design: the callbacks log each step. Here each tracker's run is opened before them and closed after the evaluation, so
that its files go to the run folder and none to the working directory, a resumed training continues the same run there,
and the run's settings and scores are logged too. Environment variables that users set for a tracker are followed. An
error at the start is the user's to fix; later ones are only notes, because a training is worth more than its log.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from pydantic import TypeAdapter

from lookonce.errors import LookonceError, UsageError
from lookonce.files import read_json, write_json
from lookonce.run.folder import RunFolder
from lookonce.text import Notify, first_line
from lookonce.train.loop.tracking.runs import Begun, MLflowRun, TensorBoardRun, WandbRun

EXTRAS = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow"}
"""The optional dependencies of the package that each tracker needs; trackers are named as their packages."""

ADVICE = {"wandb": "set WANDB_MODE=offline to track without an account", "mlflow": "check MLFLOW_TRACKING_URI"}
"""What to do if a tracker cannot start."""


RECORD = TypeAdapter(dict[str, str])
"""What `trackers.json` holds."""


class TrackerRun(Protocol):
    """A training's run in one tracker."""

    where: str
    """Where its files lie, and how to look at them."""
    id: str
    """What identifies the run in the tracker; empty if its folder does."""

    def callback(self) -> Any:
        """Transformers' callback, which logs to this run."""
        ...

    def log_scores(self, scores: Mapping[str, float], step: int) -> None: ...

    def close(self, error: BaseException | None) -> None:
        """End the run; `error` is what ended the training early."""
        ...


OPEN: dict[str, Callable[[Begun], TrackerRun]] = {
    "tensorboard": TensorBoardRun,
    "wandb": WandbRun,
    "mlflow": MLflowRun,
}


def check_trackers(names: Iterable[str]) -> None:
    """Check that the packages of these trackers are installed.

    Raises:
        UsageError: one is not; says how to install it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"train.track names {name}, which is not installed; install it with: "
                f"pip install 'lookonce[{EXTRAS[name]}]', or remove it from train.track"
            )


@dataclass
class Trackers:
    """A context manager around a training and its evaluation; all trackers are open after `open`."""

    names: Iterable[str]
    folder: RunFolder
    notify: Notify

    def __post_init__(self) -> None:
        self._runs: dict[str, TrackerRun] = {}

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for name, run in self._runs.items():
            self._try(name, lambda run=run: run.close(error))  # type: ignore[misc]

    def open(self, settings: Mapping[str, Any], first_step: int, *, is_new: bool) -> None:
        """Open a run in each tracker, and say where; a training that is not new continues those it had.

        Raises:
            UsageError: a tracker refuses, for example without a login.
        """
        ids = {} if is_new else self._recorded_ids()
        for name in self.names:
            begun = Begun(self.folder.folder.absolute(), settings, first_step, ids.get(name, ""))
            try:
                self._runs[name] = OPEN[name](begun)
            except LookonceError:
                raise
            except Exception as error:
                advice = f"{ADVICE.get(name, 'mend that')}, or remove {name} from train.track"
                raise UsageError(
                    f"train.track: {name} cannot start: {first_line(error).rstrip('.')}; {advice}"
                ) from None
            self.notify(self._runs[name].where)
        if self._runs:
            write_json(self._record, {name: run.id for name, run in self._runs.items() if run.id})

    def callbacks(self) -> list[Any]:
        """Transformers' callbacks. They must come after those that add to the logs."""
        return [run.callback() for run in self._runs.values()]

    def log_scores(self, scores: Mapping[str, float | None], step: int) -> None:
        """Log the scores of the finished run; those that were not measured are left out."""
        found = {f"final/{name}": value for name, value in scores.items() if value is not None}
        for name, run in self._runs.items():
            self._try(name, lambda run=run: run.log_scores(found, step))  # type: ignore[misc]

    def _try(self, name: str, log: Callable[[], None]) -> None:
        try:
            log()
        except (Exception, SystemExit) as error:  # a tracker's failure must not cost the run its adapter or summary
            self.notify(f"{name} could not log everything: {first_line(error)}; the run folder has all of it")

    @property
    def _record(self) -> Any:
        return self.folder.folder / "trackers.json"

    def _recorded_ids(self) -> dict[str, str]:
        """What identifies the earlier parts of this training in the trackers that need it."""
        if not self._record.exists():
            return {}
        try:
            return RECORD.validate_python(read_json(self._record))
        except (OSError, ValueError) as error:
            self.notify(f"{self._record} is broken ({first_line(error)}), so W&B and MLflow begin another run")
            return {}
