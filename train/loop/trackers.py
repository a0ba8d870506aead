"""The trackers of `train.track`: TensorBoard, W&B and MLflow, through transformers' own callbacks.

Design: the callbacks log each step. Here each tracker's run is opened before them and closed after the evaluation, so
that its files go to the run folder and none to the working directory, a resumed training continues the same run there,
and the run's settings and scores are logged too. Each is opened with the tracker's own calls, because transformers'
callbacks choose the working directory, and a new run for each resumption. The packages are optional, so they are
imported when a run is opened. Environment variables that users set for a tracker are followed. An error at the start is
the user's to fix; later ones are only notes, because a training is worth more than its log.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from pydantic import TypeAdapter

from lookonce.errors import LookonceError, Stopped, UsageError
from lookonce.files import read_json, write_json
from lookonce.run.folder import RunFolder
from lookonce.text import Notify, first_line, shell

INTEGRATIONS = "transformers.integrations"
NAME = "lookonce"
"""The project in W&B and the experiment in MLflow, unless the user's environment names another."""
MAX_MLFLOW_PARAMETER = 500
"""Characters of a setting in MLflow; some servers refuse longer ones."""
EXTRAS = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow"}
"""The optional dependencies of the package that each tracker needs; trackers are named as their packages."""
ADVICE = {"wandb": "set WANDB_MODE=offline to track without an account", "mlflow": "check MLFLOW_TRACKING_URI"}
"""What to do if a tracker cannot start."""
RECORD = TypeAdapter(dict[str, str])
"""What `trackers.json` holds."""


@dataclass(frozen=True)
class Begun:
    """A training that begins."""

    folder: Path
    settings: Mapping[str, Any]
    first_step: int
    id: str
    """What identifies its run in the tracker, if it continues one; else empty."""


class NotLogged:
    """Leaves out scalars that a tracker has for a step already.

    Trainer logs some twice, such as the epoch with the loss and with the validation loss. A killed training may have
    logged steps after its last checkpoint, and its end; those are logged again when it is resumed.
    """

    def __init__(self, last_step: Mapping[str, int]) -> None:
        self._last_step = dict(last_step)
        """The last step that is logged of each scalar."""

    def of(self, scalars: Mapping[str, Any], step: int) -> dict[str, Any]:
        """The scalars to log for a step, which count as logged from then on."""
        new = {name: value for name, value in scalars.items() if self._last_step.get(name, -1) < step}
        self._last_step |= dict.fromkeys(new, step)
        return new


class TensorBoardRun:
    """Files in `tensorboard/`; what was logged after the checkpoint that a training resumes from is hidden."""

    id = ""

    def __init__(self, begun: Begun) -> None:
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or begun.folder / "tensorboard"
        logged = _logged_at(str(folder), begun.first_step) if begun.first_step else []
        if Path(folder).exists():  # TensorBoard reads files in the order of their names, which begin with the second
            time.sleep(1 - time.time() % 1)
        self._not_logged = NotLogged(dict.fromkeys(logged, begun.first_step))
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(folder), purge_step=begun.first_step + 1)
        self._add_scalar, self._writer.add_scalar = self._writer.add_scalar, self._add_new_scalar
        # Transformers' callback closes the writer with the training, and the scores after it would go to a second file.
        # That file may sort before the first, and TensorBoard skips files that sort before what it has read.
        self._close, self._writer.close = self._writer.close, self._writer.flush
        self._writer.add_text("run", f"```json\n{json.dumps(begun.settings, indent=2)}\n```")
        path = shell(folder)
        self.where = f"TensorBoard's files are in {path}; look at them with: tensorboard --logdir {path}"

    def _add_new_scalar(self, name: str, value: float, step: int) -> None:
        if self._not_logged.of({name: value}, step):
            self._add_scalar(name, value, step)

    def callback(self) -> Any:
        return import_module(INTEGRATIONS).TensorBoardCallback(self._writer)

    def log_scores(self, scores: Mapping[str, float], step: int) -> None:
        for name, value in scores.items():
            self._writer.add_scalar(name, value, step)

    def close(self, error: BaseException | None) -> None:
        self._close()


def _logged_at(folder: str, step: int) -> list[str]:
    """The names of the scalars that TensorBoard's files have for a step; none without the folder."""
    if not Path(folder).exists():
        return []
    reader = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    events = reader(folder, size_guidance={"scalars": 0}).Reload()  # 0: all, not a sample
    return [name for name in events.Tags()["scalars"] if any(one.step == step for one in events.Scalars(name))]


class WandbRun:
    """A run of W&B, with its files in `wandb/`."""

    def __init__(self, begun: Begun) -> None:
        wandb, environment = import_module("wandb"), os.environ
        folder = Path(environment.get("WANDB_DIR") or begun.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            dir=str(folder),
            project=environment.get("WANDB_PROJECT") or NAME,
            name=environment.get("WANDB_NAME") or begun.folder.name,
            id=environment.get("WANDB_RUN_ID") or begun.id or None,
            resume=environment.get("WANDB_RESUME") or ("allow" if begun.id else None),
            config=dict(begun.settings),
        )
        self.id = self._run.id
        files = shell(Path(self._run.dir).parent)
        how = f"upload them with: wandb sync {files}" if self._run.offline else f"look at {self._run.url}"
        self.where = f"W&B's files are in {files}; {how}"

    def callback(self) -> Any:
        return import_module(INTEGRATIONS).WandbCallback()

    def log_scores(self, scores: Mapping[str, float], step: int) -> None:
        self._run.summary.update(scores)

    def close(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=getattr(error, "exit_code", 1) if error else 0)


class MLflowRun:
    """A run of MLflow, in `mlruns/` or on the server of MLFLOW_TRACKING_URI.

    A resumed training logs no step again that it has: MLflow neither replaces nor hides an earlier value.
    """

    def __init__(self, begun: Begun) -> None:
        # MLflow from 3.16 on refuses folders unless told otherwise, and reports its use to its makers.
        for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
            os.environ.setdefault(name, "true")
        self._mlflow = mlflow = import_module("mlflow")
        self._has_set_uri = not mlflow.is_tracking_uri_set()
        if self._has_set_uri:
            mlflow.set_tracking_uri((begun.folder / "mlruns").as_uri())
        self.where = self._location(begun.folder / "mlruns")
        self._run = mlflow.start_run(
            run_id=begun.id or None, run_name=begun.folder.name, experiment_id=self._experiment()
        )
        self.id = self._run.info.run_id
        self._not_logged = NotLogged(self._last_steps())
        self._log_settings(begun.settings)

    def _location(self, folder: Path) -> str:
        if not self._has_set_uri:
            return f"MLflow logs to {self._mlflow.get_tracking_uri()}"
        path = shell(folder)
        return (
            f"MLflow's files are in {path}; look at them with: "
            f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {path}"
        )

    def _experiment(self) -> str | None:
        """The experiment's number. `mlflow.set_experiment` would choose it for later trainings in this process too."""
        if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return number
        client, name = self._mlflow.MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME") or NAME
        found = client.get_experiment_by_name(name)
        return str(found.experiment_id if found else client.create_experiment(name))

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        """Log the settings that are not logged: MLflow refuses to change one, and a resumed training has them."""
        logged = self._mlflow.get_run(self.id).data.params
        values = {name: str(value)[:MAX_MLFLOW_PARAMETER] for name, value in flat(settings).items()}
        self._mlflow.log_params({name: value for name, value in values.items() if name not in logged})

    def _last_steps(self) -> dict[str, int]:
        """The last step of each metric that the run has."""
        client = self._mlflow.MlflowClient()
        names = self._mlflow.get_run(self.id).data.metrics
        return {name: max(one.step for one in client.get_metric_history(self.id, name)) for name in names}

    def callback(self) -> Any:
        callback = import_module(INTEGRATIONS).MLflowCallback()
        log = callback.on_log

        def log_new(args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
            log(args, state, control, logs=self._not_logged.of(logs, state.global_step), **kwargs)

        callback.on_log = log_new
        return callback

    def log_scores(self, scores: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(self._not_logged.of(scores, step), step=step)

    def close(self, error: BaseException | None) -> None:
        try:
            self._mlflow.flush_async_logging()
            stopped = isinstance(error, Stopped | KeyboardInterrupt)
            self._mlflow.end_run("FINISHED" if error is None else "KILLED" if stopped else "FAILED")
        finally:
            if self._has_set_uri:
                self._mlflow.set_tracking_uri(None)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


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
