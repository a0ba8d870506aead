"""Merging takes a few blocks of memory, whatever the size of a tensor or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lookonce.adapter.weights import BLOCK_VALUES

NUM_ROWS, NUM_COLUMNS = 20_480, 2_048
MAX_GROWTH = 60_000_000
"""Less than the tensor's 84 MB in bfloat16, and its 168 MB in float32."""
MERGE = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import torch
from lookonce.adapter.weights import Change, Cost, Planned, Stored, _header, write_file

folder, step = Path(sys.argv[1]), int(sys.argv[4])

def merge(name, rows, columns):
    num_bytes = 2 * rows * columns
    tensors = [Stored(one, "BF16", (rows, columns), num_bytes) for one in ("changed", "copied")]
    header = _header(tensors, {})
    with (folder / name).open("wb") as file:  # zeros that take no place on the disk
        file.write(header)
        file.truncate(len(header) + 2 * num_bytes)
    changed, copied = (replace(one, offset=len(header) + start) for one, start in zip(tensors, (0, num_bytes)))
    change = Change(torch.ones(1, rows, 8), torch.ones(1, 8, columns), 0.5)
    planned = [Planned(tensors[0], changed, change), Planned(tensors[1], copied)]
    cost = Cost()
    write_file(folder / name, folder / f"{name}-merged", planned, cost, lambda _: None)
    assert cost.change == 16.0 * rows * columns, cost
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = merge("small", 2 * step // int(sys.argv[3]), int(sys.argv[3]))
print(merge("large", int(sys.argv[2]), int(sys.argv[3])) - before)
"""


@pytest.mark.guarantee("Merging takes a few blocks of memory, whatever the size of a tensor.")
def test_the_memory_does_not_grow_with_the_tensor(tmp_path: Path, preloaded: Any) -> None:
    arguments = [str(tmp_path), str(NUM_ROWS), str(NUM_COLUMNS), str(BLOCK_VALUES)]
    done = preloaded.start(MERGE, *arguments, folder=tmp_path)
    assert done.wait() == 0, done.error
    growth = int(done.out)
    assert growth < MAX_GROWTH, f"{growth:,} bytes"
