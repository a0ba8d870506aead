"""`lookonce` as the jobs of these tests run it: with shards of some kilobytes, and slow enough to be interrupted.

knobs.json in the working directory has the seconds per image (`encode_s`), step (`step_s`) and batch of answers
(`answer_s`), the worker that exits with code 7 at its second image (`fails`), and the run file whose training exits
with it at once (`breaks`). Each encoding process writes a byte per image to encoded-JOB-PID.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import lookonce.run.open as content
from lookonce.cli import main

knobs = json.loads(Path("knobs.json").read_text())
content.MEGABYTE = 20_000

if sys.argv[1:3] == ["cache", "build"]:
    from lookonce.cache.model.tower import Tower

    encode, encoded = Tower.encode, []
    worker = sys.argv[sys.argv.index("--worker") + 1].partition("/")[0] if "--worker" in sys.argv else None

    def encode_slowly(self, *arguments):
        encoded.append(arguments)
        with open(f"encoded-{os.environ.get('SLURM_JOB_ID')}-{os.getpid()}", "a") as notes:
            notes.write(".")
        time.sleep(knobs.get("encode_s", 0))
        if worker and worker == knobs.get("fails") and len(encoded) == 2:
            os._exit(7)
        return encode(self, *arguments)

    Tower.encode = encode_slowly

if sys.argv[1] == "train" and Path(sys.argv[2]).name == knobs.get("breaks"):
    sys.exit(7)

if sys.argv[1] == "train":
    from lookonce.train.loop.log_files import MetricsLog

    begin = MetricsLog.on_step_begin

    def begin_slowly(self, *arguments, **more):
        time.sleep(knobs.get("step_s", 0))
        return begin(self, *arguments, **more)

    MetricsLog.on_step_begin = begin_slowly

if sys.argv[1] == "eval":
    from lookonce.eval.answers.files import PartialAnswers

    add = PartialAnswers.add

    def add_slowly(self, *arguments):
        add(self, *arguments)
        time.sleep(knobs.get("answer_s", 0))

    PartialAnswers.add = add_slowly

main()
