"""`curves.svg` in the run folder: the curves of a training, drawn at each save and at the end.

Design: it is drawn from `log.jsonl`, so a resumed training has the points of the steps before, each once. Costs 10 ms
per 1,000 lines of the log. A full disk is ignored here, because a drawing is not worth a training.
"""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback

from lookonce.files import write_text
from lookonce.plots import Line, Panel, line_plot, svg_file
from lookonce.run.folder import RunFolder
from lookonce.run.log_file import Curve, Curves, read_curves, smoothed


class CurvesFile(TrainerCallback):
    """Draws the curves, on the first rank."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with contextlib.suppress(OSError):
                write_text(self._folder.curves, curves_svg(read_curves(self._folder.log), self._folder.folder.name))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_save(args, state, control)


def curves_svg(curves: Curves, title: str) -> str:
    """The curves as the text of an SVG file."""
    low, high = curves.loss_range()
    lines = [
        Line("", _points(curves.loss), "faint"),
        Line("training loss", _points(smoothed(curves.loss)), "main"),
        *([Line("validation loss", _points(curves.validation_loss), "marked")] if curves.validation_loss else []),
    ]
    words = f"lowest: {curves.best[1]:.4f} at step {curves.best[0]:,}" if curves.best else ""
    losses = Panel("loss", lines, low, high, 300, curves.best, words)
    rates = [Line("", _points(curves.learning_rate), "plain")]
    highest = max(curves.learning_rate.values(), default=0.0) or 1.0
    panels = [losses, *_exact_match(curves), Panel("learning rate", rates, 0.0, highest, 70)]
    return svg_file(line_plot(title, "step", panels))


def _exact_match(curves: Curves) -> list[Panel]:
    if curves.most_right is None:
        return []
    step, value = curves.most_right
    lines = [Line("", _points(curves.exact_match), "marked")]
    words = f"highest: {value:.1%} at step {step:,}"
    return [Panel("exact match", lines, 0.0, 1.0, 130, curves.most_right, words)]


def _points(curve: Curve) -> list[tuple[float, float]]:
    return list(curve.items())
