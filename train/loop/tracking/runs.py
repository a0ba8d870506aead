"""A training's run in TensorBoard, W&B and MLflow.

Design: each is opened with the tracker's own calls, because transformers' callbacks choose the working directory, and a
new run for each resumption. The packages are optional, so they are imported when a run is opened.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lookonce.errors import Stopped
from lookonce.text import shell

INTEGRATIONS = "transformers.integrations"
NAME = "lookonce"
"""The project in W&B and the experiment in MLflow, unless the user's environment names another."""
MAX_MLFLOW_PARAMETER = 500
"""Characters of a setting in MLflow; some servers refuse longer ones."""


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
