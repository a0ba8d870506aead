"""The run file of the sample, so that training it needs no other file.

Design: those of `experiments/`, with the sample's folder in place of theirs. `run.yaml` and `staged.yaml` beside this
module are links to them, which become files in a wheel. Paths of a run file begin where a command runs; so do those of
this one, where the sample was written.
"""

from __future__ import annotations

import re
from pathlib import Path

from lookonce.files import write_text
from lookonce.text import in_yaml

NAME = "run.yaml"
HEADER = "# The sample in this folder, for a tiny model on any CPU. Every key: docs/run-file.md\n"


def write_run_file(folder: Path, stages: bool) -> Path:
    """Write `folder`/run.yaml, unless it exists, and return its path."""
    path = folder / NAME
    if not path.exists():
        write_text(path, run_file(folder, stages))
    return path


def run_file(folder: Path, stages: bool) -> str:
    """The text of the run file of the sample in `folder`."""
    text = Path(__file__).with_name("staged.yaml" if stages else NAME).read_text()
    text = re.sub(r"\A(#.*\n)+", HEADER, text)
    text = re.sub(r"data/\w+/(\S+)", lambda found: in_yaml(folder / found[1]), text)
    output = in_yaml(f"runs/{folder.absolute().name}")
    return re.sub(r"^output: .*", lambda _: f"output: {output}", text, flags=re.M)
