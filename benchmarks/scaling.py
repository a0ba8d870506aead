"""Measure training, building a cache, a study and an evaluation on 1, 2, 4 and 8 GPUs of one host.

    python benchmarks/scaling.py bench/scaling --model 8b --tokenizer Qwen3-VL-tokenizer
    python benchmarks/scaling.py bench/scaling --model 2b --tokenizer Qwen3-VL-tokenizer --parts study,eval --ranks 1,4
    CUDA_VISIBLE_DEVICES= python benchmarks/scaling.py bench/tiny --model tiny --images 96 --samples 16 --steps 4

The model has random weights, the frames the sizes of Kvasir-VQA's. The report, `MODEL.md` in the folder, is written
anew after each measurement, so a time limit loses only the one that it interrupts, and keeps the other parts that were
measured there before in the same setting. A measurement that fails is named, and the others are made all the same. On a
CPU, ranks use gloo.

step    the variant `shared` of `lookonce bench step`, with `--samples` samples a rank and with `--samples` in all. CUDA
        events time the exchange of gradients on each rank. A rank that comes early waits in it for the others: of each
        step the shortest time of all ranks is the exchange, and what the others spend more is waiting.
cache   one worker a GPU builds a cache of `--images` different files, with the tower loaded. Decoding alone uses the
        same processes, and the disk alone gets the same bytes, each on all ranks at once; the tower's rate follows from
        the time that it kept the GPU busy. The slowest of the three limits the build.
study   `lookonce study run` of 8 trainings of `--steps` steps; a run before all has compiled the code.
eval    `lookonce eval` of such a run under torchrun: answers of up to 32 tokens to questions about these files. Ranks
        take whole batches, so `eval.tokens_per_batch` is 8192. An evaluation before, on the most ranks, has compiled
        the code; seconds include those in which it is loaded.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from lookonce.bench.step import bench_step, find_variants, make_run
from lookonce.cache.build.encode import DecodeAhead, Request
from lookonce.cache.build.progress import planned_images
from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.store.metadata import cut
from lookonce.environment import num_cores, num_ranks, rank
from lookonce.files import write_text
from lookonce.run.config import read_run_file
from lookonce.run.folder import Environment
from lookonce.run.open import TO_BUILD, TO_MEASURE, open_run
from lookonce.train.loop import trainer
from lookonce.train.loop.distributed import Ranks
from lookonce.train.model import packs
from lookonce.train.model.packs import average_gradients

Row = dict[str, Any]
ORDER = "LOOKONCE_SCALING"
"""The variable that says what a process measures which `Host` has started."""
NUM_RUNS, SEED = 8, 42
"""Trainings of the study, and the seed of the first."""
NUM_SHARDS = 64
"""Shards of the cache that is built: with 8 workers, 8 for each."""
NUM_WARM_UP = 32
"""Images that each worker encodes before: memory for transfers is slow to allocate the first time."""
COMPARED = {"step": "ms a sample", "cache": "images a second", "study": "seconds in all", "eval": "seconds to answer"}


class Exchange:
    """The exchange of gradients of a training, timed; in place of `average_gradients`."""

    def __init__(self) -> None:
        self.times: list[tuple[Any, Any]] = []

    def __call__(self, model: Any) -> None:
        begin = _moment()
        average_gradients(model)
        self.times.append((begin, _moment()))


def _moment() -> Any:
    """A moment of the GPU's work, or of the CPU's."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end))


def step_of_rank(run_file: Path, *sizes: str) -> Iterator[Row]:
    """Train with each number of samples a step, as one of the ranks; yields what all ranks have measured."""
    if not torch.cuda.is_available():  # gradients are exchanged as by captured passes, not by DDP
        packs._check_gradients_are_averaged = lambda *_: None
        trainer.PackTrainer._averages_at_step_end = lambda self, model: self.args.world_size > 1
    for samples in sizes:
        trainer.average_gradients = exchange = Exchange()
        with open_run(read_run_file(run_file, [f"batch.samples_per_step={samples}"]), TO_MEASURE) as opened:
            [report] = bench_step(opened, opened.examples("train")[0], find_variants(["shared"]))
        [measured] = report.measured
        times = [_milliseconds(*moments) for moments in exchange.times[-measured.num_steps :]]
        reserved = torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0
        of_all = [mine := (times, reserved, measured.wait_share)] * num_ranks()
        if num_ranks() > 1:
            torch.distributed.all_gather_object(of_all, mine)
        step_ms = 1e3 * measured.seconds / measured.num_steps
        by_rank = [times for times, *_ in of_all]
        shortest = statistics.mean(map(min, zip(*by_rank, strict=True))) if times else 0.0
        waiting = statistics.mean(itertools.chain(*by_rank)) - shortest if times else 0.0
        yield {
            "ranks": num_ranks(),
            "samples a step": int(samples),
            "ms a sample": measured.ms_per_sample,
            "ms a step": step_ms,
            "exchange, ms": shortest,
            "share of the exchange": shortest / step_ms,
            "share of waiting for ranks": waiting / step_ms,
            "share of waiting for data": max(waits for *_, waits in of_all),
            "GB reserved": max(memory for _, memory, _ in of_all),
            "first loss": measured.losses[0],
        }


def cache_of_rank(run_file: Path, place: str) -> Iterator[Row]:
    """Build a cache in a folder, as one of its workers; yields the rates of all workers together."""
    ranks, folder = Ranks.join(), Path(place)
    with open_run(read_run_file(run_file, [f"cache.dir={folder}"]), TO_BUILD) as opened:
        processor, fingerprint, tower = opened.processor, opened.fingerprint, opened.load_tower()
        wanted = planned_images(opened.images, processor)
        mine = sorted(wanted[ranks.rank :: ranks.num_ranks], key=lambda image: image.num_tokens)
        of_all, of_mine = (sum(image.num_tokens for image in images) for images in (wanted, mine))
        shard_bytes = of_all * fingerprint.bytes_per_token // NUM_SHARDS
        options = BuildOptions(shard_bytes, worker=(ranks.rank, ranks.num_ranks), wait=False)
        beside = importlib.import_module("cache")  # benchmarks/cache.py, beside this file

        def build(root: Path, images: Any) -> Any:
            return build_cache(root, fingerprint, processor, images, lambda: tower, options)

        def decode() -> None:
            decoder = DecodeAhead(opened.images.path_of, processor, tower.device)
            for _ in decoder.run(map(Request, cut(mine, tower.tokens_per_tower_batch))):
                pass
            decoder.close()

        def rate(seconds: float) -> float:
            """Images a second of all workers, of which this one took so many seconds, until the last one has ended."""
            return 1e6 * len(wanted) / ranks.largest(int(1e6 * seconds))

        def timed(work: Callable[[], Any]) -> tuple[float, Any]:
            """Images a second, and what the work returns."""
            ranks.wait()
            began = time.perf_counter()
            done = work()
            return rate(time.perf_counter() - began), done

        build(own := folder / f"rank-{ranks.rank}", beside.first(opened.images, NUM_WARM_UP))
        decoding, _ = timed(decode)
        ranks.wait()
        writing = rate(beside.disk_alone(own, of_mine * fingerprint.bytes_per_token, shard_bytes))
        built, report = timed(lambda: build(folder / "built", opened.images))
        encoded = ranks.gather_for_all((report.num_encoded, report.phases.get("tower", 0.0)))
        cores = ranks.gather_for_all(num_cores())
    if ranks.is_first:
        tower_rate = sum(number / max(seconds, 1e-3) for number, seconds in encoded if number)
        alone = {"decoding alone": decoding, "disk alone": writing, "tower alone": tower_rate}
        limit = min(alone, key=alone.__getitem__)
        row = {"ranks": ranks.num_ranks, "cores": sum(cores), "images a second": built} | alone
        gigabytes = built / len(wanted) * of_all * fingerprint.bytes_per_token / 1e9
        yield row | {"limit": limit, "share of the limit": built / alone[limit], "GB/s": gigabytes}


class Failed(Exception):
    """A measurement has failed."""


class Host:
    """Runs the measurements, and writes the report."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.folder, self.model = given, given.folder.resolve(), given.model
        self.parts = given.parts.split(",")
        self.results, self.setting = self.folder / f"{self.model}.json", asdict(Environment.this())
        self.rows, self.commands = self._measured_before()
        self.failures: list[str] = []
        self.has_gpus = torch.cuda.is_available()

    def _measured_before(self) -> tuple[dict[str, list[Row]], dict[str, str]]:
        """The rows of the other parts that were measured in this setting, and the commands that measured them."""
        before = json.loads(self.results.read_text()) if self.results.exists() else {}
        if before.get("setting") != self.setting:
            return {}, {}
        kept = [part for part in before["rows"] if part not in self.parts]
        rows, commands = ({part: before[name][part] for part in kept} for name in ("rows", "commands"))
        return rows, commands

    def run(self) -> None:
        order = {name: value for name, value in vars(self.given).items() if name not in ("parts", "scratch")}
        self.call([sys.executable, __file__], "make", **{ORDER: json.dumps(["make", order], default=str)})
        for part in self.parts:
            rows, self.commands[part] = self.rows.setdefault(part, []), f"python {' '.join(sys.argv)}"
            for number in self.given.ranks:
                try:
                    rows += getattr(self, part)(number)
                except Failed as failed:
                    self.failures.append(f"{part} on {number}: {failed}")
                    print(self.failures[-1], file=sys.stderr)
                rows.sort(key=lambda row: row["ranks"])
                results = {"rows": self.rows, "commands": self.commands, "setting": self.setting}
                write_text(self.results, json.dumps(results, indent=1))
                write_text(self.folder / f"{self.model}.md", self.report())
        print(self.report())
        sys.exit(1 if self.failures else 0)

    def call(self, command: list[Any], name: str, **environment: str) -> tuple[float, str]:
        """Run a command; its seconds and its output. A failure is an error with the end of its log."""
        log, began = self.folder / f"{self.model}-{name}.log", time.perf_counter()
        with log.open("w") as file:
            output: Any = {"stdout": subprocess.PIPE, "stderr": file, "text": True}
            done = subprocess.run([*map(str, command)], env=os.environ | environment, **output)
        if done.returncode:
            raise Failed(f"{name} failed with {done.returncode}; the end of {log}:\n{log.read_text()[-3000:]}")
        return time.perf_counter() - began, done.stdout

    def on_ranks(self, number: int, *words: Any) -> list[Any]:
        """The command that starts Python on some ranks."""
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number] if number > 1 else []
        return [sys.executable, *several, *words]

    def ordered(self, part: str, number: int, run: str, *words: Any) -> list[Row]:
        order = json.dumps([part, str(self.folder / f"{run}.yaml"), *map(str, words)])
        _, out = self.call(self.on_ranks(number, __file__), f"{part}-{number}", **{ORDER: order})
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def step(self, number: int) -> list[Row]:
        return self.ordered(
            "step", number, self.model, *dict.fromkeys((self.given.samples * number, self.given.samples))
        )

    def cache(self, number: int) -> list[Row]:
        scratch = (self.given.scratch or self.folder) / f"{self.model}-scratch"
        try:
            return self.ordered("cache", number, f"{self.model}-many", scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def study(self, number: int) -> list[Row]:
        _ = self.trained
        return [
            {"ranks": number, "runs": NUM_RUNS, "seconds in all": self.run_study(f"study-{number}", number, NUM_RUNS)}
        ]

    @cached_property
    def trained(self) -> Path:
        """The folder of a run that was trained now, which has compiled the code."""
        self.run_study("first", 1, 1)
        return self.folder / f"{self.model}-first" / f"plain-{SEED}"

    def run_study(self, name: str, number: int, runs: int) -> float:
        file, output = (self.folder / f"{self.model}-{name}{suffix}" for suffix in (".yaml", ""))
        shutil.rmtree(output, ignore_errors=True)
        values = {
            "base": str(self.folder / f"{self.model}-study.yaml"),
            "output": str(output),
            "variants": {"plain": {}},
        }
        write_text(file, yaml.safe_dump(values | {"seeds": [*range(SEED, SEED + runs)]}))
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(number)))
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus.split(",")[:number])} if self.has_gpus else {}
        parallel = [] if self.has_gpus else ["--parallel", number]
        return self.call([sys.executable, "-m", "lookonce", "study", "run", file, *parallel], name, **visible)[0]

    @cached_property
    def answering(self) -> tuple[Path, Any]:
        """The run that answers, and its run file; the images are in the cache, and the code is compiled."""
        run, file = self.trained, self.folder / f"{self.model}-eval.yaml"
        for words in (("cache", "build", file), ("eval", file, "--split", "test")):
            self.call(self.on_ranks(max(self.given.ranks), "-m", "lookonce", *words), f"before-eval-{words[0]}")
        return run, file

    def eval(self, number: int) -> list[Row]:
        run, file = self.answering
        words = ("-m", "lookonce", "eval", file, "--split", "test")
        seconds, _ = self.call(self.on_ranks(number, *words), f"eval-{number}")
        cost = json.loads((run / "answering" / "test.json").read_text())
        num_questions = len((run / "predictions" / "test.jsonl").read_text().splitlines())
        row = {"ranks": number, "questions": num_questions, "of the first rank": cost["num_answered"]}
        return [row | {"seconds to answer": cost["seconds"], "seconds in all": seconds}]

    def report(self) -> str:
        measured = {part: rows for part, rows in self.rows.items() if rows}
        most = max((row["ranks"] for rows in measured.values() for row in rows), default=0)
        lines = [f"# {self.model} on up to {most} ranks of a host"]
        for part, rows in measured.items():
            lines += ["", f"## {part}", "", *_markdown(rows, COMPARED[part]), "", f"`{self.commands[part]}`"]
        if self.failures:
            lines += ["", "## Not measured", "", *(f"- {failure.partition(';')[0]}" for failure in self.failures)]
        lines += ["", "## Setting", "", "```yaml", yaml.safe_dump(self.setting).strip()]
        with suppress(OSError):
            lines += [subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout.strip()]
        return "\n".join([*lines, "```", ""])


def _markdown(rows: list[Row], compared: str) -> list[str]:
    """A table whose last column is how many times as fast a row is as the first one."""
    lines = []
    for row in rows:
        ratio = rows[0][compared] / row[compared]
        faster = {"times as fast": 1 / ratio if "a second" in compared else ratio}
        formats = {name: ".1%" if name.startswith("share") else ".4g" for name in row}
        shown = [f"{value:{formats[name]}}" if isinstance(value, float) else str(value) for name, value in row.items()]
        lines.append([*shown, f"{faster['times as fast']:.2f}"])
    return [f"| {' | '.join(cells)} |" for cells in ([*rows[0], "times as fast"], ["---"] * len(lines[0]), *lines)]


def make(folder: str, model: str, tokenizer: str, ranks: list[int], samples: int, images: int, steps: int) -> None:
    """Write model, frames and run files, and build the cache of the training."""
    num_questions = 4 * samples * max(ranks)  # packs of few steps differ from those of an epoch
    run = make_run(Path(folder), model, max(-(-num_questions // 384), 1) * 64, Path(tokenizer) if tokenizer else None)
    [train] = run.data.train
    data, lines = train.parent, train.read_text().splitlines(keepends=True)
    assert len(lines) >= num_questions, f"{len(lines)} questions, {num_questions} are needed"
    about: dict[str, list[Row]] = {}
    for line in lines:
        record = json.loads(line)
        about.setdefault(record["images"][0], []).append(record)
    frames, many = [*about.items()], []
    (data / "many").mkdir(exist_ok=True)
    for number in range(images):  # other bytes at the end make another image for the cache
        (frame, records), name = frames[number % len(frames)], f"many/{number:06d}.jpg"
        (data / name).write_bytes((data / frame).read_bytes() + str(number).encode())
        many += [record | {"images": [name]} for record in records]
    write_text(data / "many.jsonl", "".join(json.dumps(record) + "\n" for record in many))
    write_text(data / "few.jsonl", "".join(lines[:num_questions]))
    write_text(data / "test.jsonl", "".join(lines[:samples]))
    few, test, values = (
        str(data / "few.jsonl"),
        str(data / "test.jsonl"),
        yaml.safe_load((data / "run.yaml").read_text()),
    )
    training = {"train": values["train"] | {"steps": steps}}
    answers = {"eval": {"max_new_tokens": 32, "tokens_per_batch": 8192}}
    of_first = {"output": str(Path(folder).resolve() / f"{model}-first" / f"plain-{SEED}")}
    for name, changes in {
        "": {"data": {"train": few}},
        "-many": {"data": {"train": str(data / "many.jsonl")}},
        "-study": {"data": {"train": few, "test": test}} | training,
        "-eval": {"data": {"train": few, "test": str(data / "many.jsonl")}} | training | answers | of_first,
    }.items():
        write_text(Path(folder) / f"{model}{name}.yaml", yaml.safe_dump(values | changes))
    open_run(run, TO_BUILD).build()


def of_rank(part: str, *words: Any) -> None:
    """Measure, or make, as a process that `Host` has started; the first rank prints what all have measured."""
    if part == "make":
        return make(**words[0])
    for row in {"step": step_of_rank, "cache": cache_of_rank}[part](Path(words[0]), *words[1:]):
        if rank() == 0:
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for model, data, logs and the report")
    parser.add_argument("--model", default="2b", help="as of `lookonce bench step`")
    parser.add_argument("--tokenizer", default="", help="folder of a tokenizer; by default the sample's")
    parser.add_argument("--parts", default="step,cache,study,eval")
    parser.add_argument("--ranks", help="by default 1, 2, 4 and 8, as far as there are GPUs; 1 and 2 on a CPU")
    parser.add_argument("--scratch", type=Path, help="where the cache is built; by default in the folder")
    parser.add_argument("--samples", type=int, default=96, help="samples of a rank in a step")
    parser.add_argument("--images", type=int, default=1600, help="images of the cache and of the evaluation")
    parser.add_argument("--steps", type=int, default=60, help="of a training of the study")
    given = parser.parse_args()
    most = torch.cuda.device_count() or 2
    given.ranks = [int(word) for word in (given.ranks or "1,2,4,8").split(",") if given.ranks or int(word) <= most]
    given.folder.mkdir(parents=True, exist_ok=True)
    Host(given).run()


if __name__ == "__main__":
    if ORDER in os.environ:
        of_rank(*json.loads(os.environ.pop(ORDER)))
    else:
        main()
