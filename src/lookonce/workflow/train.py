"""What `lookonce train` does in a row: train, answer the questions of the evaluation split, summarise.

Design: put together here, above training and evaluation, so that neither imports the other's users.
"""

from __future__ import annotations

from typing import Any

import torch

from lookonce.eval.run import evaluate, save_evaluation
from lookonce.eval.scores.metrics import Evaluation
from lookonce.files import write_json
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.status.summary import Summary, summarise
from lookonce.text import Notify
from lookonce.train.model.load import load_trained
from lookonce.train.train import Training, open_training


def train(run: RunFile, *, resume: bool = False, restart: bool = False, notify: Notify = print) -> Summary | None:
    """Train a run from its cache, evaluate the adapter, and write the summary, which is also returned.

    A finished run is not trained again. `resume` continues from the last checkpoint, `restart` moves what the folder
    holds away first. Under torchrun it returns None on all ranks but the first, which alone evaluates the adapter.

    Raises:
        Stopped: a signal asked for it; the current step is saved.
        LookonceError: anything else that a user can mend.
    """
    ranks, training = open_training(run, resume=resume, restart=restart, notify=notify)
    if training is None:
        if not ranks.is_first:
            return None
        notify(f"{run.output} is trained already; the summary below was written then (--restart trains again)")
        return Summary.read(RunFolder(run.output))
    with training.heartbeat() as heartbeat:
        model = training.run(heartbeat)
        if not ranks.is_first:
            return None
        heartbeat.enter("evaluating")
        evaluation = _evaluate(training, model)
        del model
        summary = summarise(training.session.inputs, training.session.cache, training.folder.read_trained(), evaluation)
        write_json(training.folder.folder / "summary.json", summary.to_json())
    return summary


def _evaluate(training: Training, model: Any) -> Evaluation | None:
    """Evaluate the trained model, or the adapter in the run folder; None if there is nothing to ask or no memory."""
    session, folder = training.session, training.folder
    inputs, split = session.inputs, session.inputs.run.eval.split
    if not inputs.records[split]:
        return None
    try:
        evaluation = evaluate(session, model or load_trained(inputs.model_folder, inputs.run, folder.adapter), split)
    except torch.OutOfMemoryError:
        if not inputs.run.train.fsdp:
            raise
        training.notify(
            "out of memory: the model does not fit one GPU to answer questions; "
            f"on a larger one run: lookonce eval {folder.folder}"
        )
        return None
    save_evaluation(folder, split, evaluation)
    return evaluation
