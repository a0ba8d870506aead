"""The losses of a training as a plot of block characters, for a terminal without colours.

Design: the training loss is an area, whose upper edge has eighths of a line; the validation loss is marks on it. The
first steps may leave the plot at the top, because their losses would flatten the rest. Exact match, if it was measured
while training, is one line of blocks below, from 0 to 100 %.
"""

from __future__ import annotations

from bisect import bisect_left

from lookonce.run.log_file import Curve, Curves

BLOCKS = " ▁▂▃▄▅▆▇█"
MARK = "◆"
HEIGHT = 10
"""Lines of the plot, without its title and its axis."""
LABEL = 8
"""Characters of the numbers at the vertical axis."""
MARGIN = 0.1
"""Share of the height below the lowest loss."""


def loss_plot(curves: Curves, width: int = 80) -> str:
    """The plot; empty without two points to draw."""
    if len(curves.loss) < 2 or width < LABEL + 20:
        return ""
    low, high = curves.loss_range()
    low -= MARGIN * (high - low)
    last, num_columns = max([*curves.loss, *curves.validation_loss, *curves.exact_match]), width - LABEL - 2
    heights = [
        min(max(HEIGHT * (value - low) / (high - low), 0.125), HEIGHT)
        for value in columns(curves.loss, last, num_columns)
    ]
    cells = [[_block(height - row) for height in heights] for row in reversed(range(HEIGHT))]
    for step, loss in curves.validation_loss.items():
        row = min(max(HEIGHT * (high - loss) / (high - low), 0), HEIGHT - 1)
        cells[int(row)][_column(step, last, num_columns)] = MARK
    return "\n".join([_title(curves), *_with_axes(cells, low, high, last), *_exact_match(curves, last, num_columns)])


def _exact_match(curves: Curves, last: int, num_columns: int) -> list[str]:
    """Two lines, aligned with the plot; none if exact match was not measured."""
    if curves.most_right is None:
        return []
    step, value = curves.most_right
    blocks = "".join(_block(max(share, 0.125)) for share in columns(curves.exact_match, last, num_columns))
    return [f"{'':{LABEL}}  exact match, highest {value:.1%} at step {step:,}", f"{'100%':>{LABEL}} │{blocks}"]


def columns(curve: Curve, last: int, number: int) -> list[float]:
    """A curve as a value for each column: the mean of its points; without any, on the line between its neighbours."""
    found: dict[int, list[float]] = {}
    for step, value in curve.items():
        found.setdefault(_column(step, last, number), []).append(value)
    means = {column: sum(values) / len(values) for column, values in found.items()}
    known = list(means)
    return [means[column] if column in means else _between(means, known, column) for column in range(number)]


def _between(means: dict[int, float], known: list[int], column: int) -> float:
    """The value at a column on the line between its neighbours; beyond the ends, that of the end."""
    index = bisect_left(known, column)
    if index in (0, len(known)):
        return means[known[min(index, len(known) - 1)]]
    left, right = known[index - 1], known[index]
    return means[left] + (means[right] - means[left]) * (column - left) / (right - left)


def _column(step: int, last: int, number: int) -> int:
    return max(-(-step * number // last) - 1, 0)


def _block(filled: float) -> str:
    return BLOCKS[round(8 * min(max(filled, 0), 1))]


def _title(curves: Curves) -> str:
    best = curves.best
    validation = f"   {MARK} validation loss, lowest {best[1]:.4f} at step {best[0]:,}" if best else ""
    return f"{'':{LABEL}}  {BLOCKS[-1]} loss{validation}"


def _with_axes(cells: list[list[str]], low: float, high: float, last: int) -> list[str]:
    """The lines of the plot with numbers at the left and below."""
    labels = {0: high, HEIGHT // 2: (low + high) / 2, HEIGHT - 1: low + (high - low) / HEIGHT / 2}
    lines = [
        f"{f'{labels[row]:.3g}' if row in labels else '':>{LABEL}} │{''.join(line).rstrip()}"
        for row, line in enumerate(cells)
    ]
    width = len(cells[0])
    return [*lines, f"{'':{LABEL}} └{'─' * width}", f"{'':{LABEL}}  0{f'step {last:,}':>{width - 1}}"]
