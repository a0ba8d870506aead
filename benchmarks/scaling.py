"""Measure training, building a cache, a study and an evaluation on 1, 2, 4 and 8 GPUs of one host.

    python benchmarks/scaling.py bench/scaling --model 8b --tokenizer Qwen3-VL-tokenizer
    python benchmarks/scaling.py bench/scaling --model 2b --tokenizer Qwen3-VL-tokenizer --parts study,eval --ranks 1,4
    CUDA_VISIBLE_DEVICES= python benchmarks/scaling.py /tmp/scaling --model tiny --images 32 --samples 16

The model has random weights, the frames the sizes of Kvasir-VQA's. The report, `MODEL.md` in the folder, is written
anew after each measurement, so a time limit loses only the one that it interrupts. On a CPU ranks use gloo.

step    the variant `shared` of `lookonce bench step`, with `--samples` samples a rank and with `--samples` in all. The
        exchange of gradients is timed on each rank by CUDA events. A rank that comes early waits in it for the others,
        so of each step the shortest time of all ranks is the exchange, and what the others spend more is waiting. Apart
        from that, the exchange is repeated before the first step, when all ranks are there.
cache   one worker a GPU builds a cache of `--images` different files from nothing, with the tower loaded and the plan
        written. Decoding alone uses the same processes, and the disk alone gets the same bytes, both on all ranks at
        once; the tower's rate follows from the time that the GPU was busy with it. The slowest limits the build.
study   `lookonce study run` of 8 trainings of `--steps` steps; a run before it has compiled the code.
eval    `lookonce eval` of such a run, under torchrun, with answers of up to 32 tokens and `eval.tokens_per_batch: 8192`, as
        ranks take whole batches; the largest number of ranks comes first, as it compiles.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from lookonce.bench.step import bench_step, find_variants, make_run
from lookonce.cache.build.encode import DecodeAhead, Request
from lookonce.cache.build.progress import planned_images
from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.store.metadata import cut
from lookonce.environment import library_versions, num_ranks, rank
from lookonce.files import write_text
from lookonce.run.config import read_run_file
from lookonce.run.open import TO_BUILD, TO_MEASURE, open_run
from lookonce.train.loop import trainer
from lookonce.train.loop.distributed import Ranks
from lookonce.train.model import packs

Rows = list[dict[str, Any]]
ORDER = "LOOKONCE_SCALING"
"""The variable that says what a process measures which `Host` has started."""
NUM_ALONE = 20
"""How often the exchange of gradients is repeated before the first step."""
NUM_RUNS, SEED = 8, 42
"""Trainings of the study, and the seed of the first."""
NUM_SHARDS = 64
"""Shards of the cache that is built: with 8 workers, 8 for each."""
NUM_WARM_UP = 32
"""Images that each worker encodes before: memory for transfers is slow to allocate the first time."""


class Exchange:
    """The exchange of gradients of a training, timed; in place of `average_gradients`."""

    def __init__(self) -> None:
        self._exchange, self._times = trainer.average_gradients, []  # type: ignore[var-annotated]
        self.alone_ms = 0.0

    def __call__(self, model: Any) -> None:
        if not self._times:
            alone = [self._time(model) for _ in range(NUM_ALONE)]
            self.alone_ms = statistics.median(map(_elapsed_ms, alone))
        self._times.append(self._time(model))

    def _time(self, model: Any) -> tuple[Any, Any]:
        begin = _now()
        self._exchange(model)
        return begin, _now()

    def milliseconds(self, num_steps: int) -> list[float]:
        """The times of the last steps."""
        return [_elapsed_ms(times) for times in self._times[-num_steps:]]


def _now() -> Any:
    """A moment of the GPU's work, or of the CPU's."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(times: tuple[Any, Any]) -> float:
    begin, end = times
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end))


def step_of_rank(run_file: Path, *sizes: str) -> Iterator[dict[str, Any]]:
    """Train with each number of samples a step, as one of the ranks; yields what all ranks have measured."""
    if not torch.cuda.is_available():  # gradients are exchanged as by captured passes, not by DDP
        packs._check_gradients_are_averaged = lambda *_: None
        trainer.PackTrainer._averages_at_step_end = lambda self, model: self.args.world_size > 1  # type: ignore[method-assign]
    average = trainer.average_gradients
    for samples in sizes:
        trainer.average_gradients = average
        trainer.average_gradients = exchange = Exchange()  # type: ignore[assignment]
        with open_run(read_run_file(run_file, [f"batch.samples_per_step={samples}"]), TO_MEASURE) as opened:
            [report] = bench_step(opened, opened.examples("train")[0], find_variants(["shared"]))
        [measured] = report.measured
        reserved = torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0
        mine = (exchange.milliseconds(measured.num_steps), exchange.alone_ms, reserved, measured.wait_share)
        of_all = [mine] * num_ranks()
        if num_ranks() > 1:
            torch.distributed.all_gather_object(of_all, mine)
        times, alone, memory, waits = zip(*of_all, strict=True)
        shortest = statistics.mean(map(min, zip(*times, strict=True))) if num_ranks() > 1 else 0.0
        step_ms = 1e3 * measured.seconds / measured.num_steps
        yield {
            "ranks": num_ranks(),
            "samples a step": int(samples),
            "ms a sample": measured.ms_per_sample,
            "ms a step": step_ms,
            "exchange alone, ms": max(alone),
            "exchange in a step, ms": shortest,
            "of the step": shortest / step_ms,
            "waiting for other ranks": (statistics.mean(itertools.chain(*times)) - shortest) / step_ms
            if shortest
            else 0.0,
            "waiting for data": max(waits),
            "GB reserved": max(memory),
            "first loss": measured.losses[0],
        }


def cache_of_rank(run_file: Path, place: str) -> Iterator[dict[str, Any]]:
    """Build a cache in a folder, as one of its workers; yields the rates of all workers together."""
    ranks, folder = Ranks.join(), Path(place)
    with open_run(read_run_file(run_file, [f"cache.dir={folder}"]), TO_BUILD) as opened:
        processor, fingerprint, tower = opened.processor, opened.fingerprint, opened.load_tower()
        wanted = planned_images(opened.images, processor)
        num_bytes = [
            sum(image.num_tokens for image in some) * fingerprint.bytes_per_token
            for some in (wanted, wanted[ranks.rank :: ranks.num_ranks])
        ]
        mine = sorted(wanted[ranks.rank :: ranks.num_ranks], key=lambda image: image.num_tokens)
        options = BuildOptions(num_bytes[0] // NUM_SHARDS, worker=(ranks.rank, ranks.num_ranks), wait=False)
        own = folder / f"rank-{ranks.rank}"

        def build(root: Path, images: Any) -> Any:
            return build_cache(root, fingerprint, processor, images, lambda: tower, options)

        def decode() -> None:
            decoder = DecodeAhead(opened.images.path_of, processor, tower.device)
            for _ in decoder.run(map(Request, cut(mine, tower.tokens_per_tower_batch))):
                pass
            decoder.close()

        def rate(work: Callable[[], Any]) -> tuple[float, Any]:
            """Images a second of all workers, until the last one has ended; and what the work returns."""
            ranks.wait()
            began = time.perf_counter()
            done = work()
            return 1e6 * len(wanted) / ranks.largest(int(1e6 * (time.perf_counter() - began))), done

        disk = importlib.import_module("cache").disk_alone  # benchmarks/cache.py, beside this file
        build(own, opened.images.first(NUM_WARM_UP))
        decoding, _ = rate(decode)
        writing, _ = rate(lambda: disk(own, num_bytes[1], options.shard_bytes))
        ranks.first_decides(lambda: build(folder / "plan", opened.images.first(0)))
        built, report = rate(lambda: build(folder / "built", opened.images))
        of_all = ranks.gather((report.num_encoded, report.phases.get("tower", 0.0)))
    if of_all:
        alone = {
            "decoding alone": decoding,
            "disk alone": writing,
            "tower alone": sum(number / max(seconds, 1e-9) for number, seconds in of_all if number),
        }
        limit = min(alone, key=alone.__getitem__)
        shares = {"limited by": limit.split()[0], "of that limit": built / alone[limit]}
        yield (
            {"ranks": ranks.num_ranks, "images a second": built}
            | alone
            | shares
            | {"GB a second": built * num_bytes[0] / len(wanted) / 1e9}
        )


def of_rank(part: str, *words: str) -> None:
    """Measure as a process that `Host` has started; the first rank prints what all have measured."""
    if part == "make":
        return make(**json.loads(words[0]))
    for row in {"step": step_of_rank, "cache": cache_of_rank}[part](Path(words[0]), *words[1:]):  # type: ignore[operator]
        if rank() == 0:
            print(json.dumps(row), flush=True)


class Host:
    """Runs the measurements, and writes the report."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.folder = given, given.folder
        self.rows: dict[str, Rows] = {}
        self.number_of_gpus = torch.cuda.device_count()

    def run(self) -> None:
        given = self.given
        order = {name: value for name, value in vars(given).items() if name not in ("parts", "folder", "tokenizer")}
        order |= {"folder": str(self.folder), "tokenizer": given.tokenizer and str(given.tokenizer)}
        self.call([sys.executable, __file__], "make", **{ORDER: json.dumps(["make", json.dumps(order)])})
        for part in given.parts.split(","):
            numbers = sorted(given.ranks, reverse=part == "eval")
            for number in numbers:
                self.rows.setdefault(part, []).extend(getattr(self, part)(number))
                self.rows[part].sort(key=lambda row: row.get("ranks", row.get("GPUs")))
                write_text(self.folder / f"{given.model}.json", json.dumps(self.rows, indent=1))
                write_text(self.folder / f"{given.model}.md", self.report())
        print(self.report())

    def call(self, command: Sequence[object], name: str, **environment: str) -> tuple[float, str]:
        """Run a command; its seconds and its output. A failure is an error with the end of its log."""
        log = self.folder / f"{name}.log"
        began = time.perf_counter()
        with log.open("w") as file:
            done = subprocess.run(
                [*map(str, command)], stdout=subprocess.PIPE, stderr=file, text=True, env=os.environ | environment
            )
        if done.returncode:
            raise SystemExit(f"{name} failed with {done.returncode}; the end of {log}:\n{log.read_text()[-3000:]}")
        return time.perf_counter() - began, done.stdout

    def on_ranks(self, number: int, *words: object) -> list[object]:
        """A command line for some ranks."""
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number]
        return [sys.executable, *(several if number > 1 else []), *words]

    def gpus(self, number: int) -> Mapping[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(number)))} if self.number_of_gpus else {}

    def ranks(self, part: str, number: int, *words: object) -> Rows:
        order = json.dumps([part, *map(str, words)])
        _, out = self.call(self.on_ranks(number, __file__), f"{part}-{number}", **{ORDER: order})
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def step(self, number: int) -> Rows:
        samples = self.given.samples
        sizes = dict.fromkeys((samples * number, samples))
        return self.ranks("step", number, self.folder / f"{self.given.model}.yaml", *sizes)

    def cache(self, number: int) -> Rows:
        scratch = self.folder / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            return self.ranks("cache", number, self.folder / f"{self.given.model}-many.yaml", scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def study(self, number: int) -> Rows:
        seconds = self.run_study(f"study-{number}", number, NUM_RUNS)
        return [{"GPUs": number, "runs": NUM_RUNS, "seconds in all": seconds}]

    def run_study(self, name: str, number: int, runs: int) -> float:
        if runs > 1 and not (self.folder / "study-first").exists():
            self.run_study("study-first", 1, 1)
        output = self.folder / name
        shutil.rmtree(output, ignore_errors=True)
        base = self.folder / f"{self.given.model}-study.yaml"
        values = {
            "base": str(base),
            "output": str(output),
            "variants": {"plain": {}},
            "seeds": [*range(SEED, SEED + runs)],
        }
        write_text(self.folder / f"{name}.yaml", yaml.safe_dump(values))
        parallel = [] if self.number_of_gpus else ["--parallel", number]
        command = [sys.executable, "-m", "lookonce", "study", "run", self.folder / f"{name}.yaml", *parallel]
        return self.call(command, name, **self.gpus(number))[0]

    def eval(self, number: int) -> Rows:
        if not (run := self.folder / "study-first" / f"plain-{SEED}").exists():
            self.run_study("study-first", 1, 1)
        file = self.folder / f"{self.given.model}-eval.yaml"
        seconds, _ = self.call(
            self.on_ranks(number, "-m", "lookonce", "eval", file, "--split", "test"), f"eval-{number}"
        )
        cost = json.loads((run / "answering" / "test.json").read_text())
        num_questions = len((run / "predictions" / "test.jsonl").read_text().splitlines())
        row = {"ranks": number, "questions": num_questions, "of the first rank": cost["num_answered"]}
        return [row | {"seconds to answer": cost["seconds"], "seconds in all": seconds}]

    def report(self) -> str:
        given = self.given
        lines = [f"# {given.model} on {max(given.ranks)} GPUs of a host", ""]
        for part, found in self.rows.items():
            lines += [f"## {part}", "", *_markdown([self._faster(part, row) for row in found]), ""]
        names = [torch.cuda.get_device_name(index) for index in range(self.number_of_gpus)]
        cores = f"{len(os.sched_getaffinity(0))} CPU cores"
        lines += ["## Setting", "", f"{', '.join(names) or 'no GPU'}; {cores}; Python {platform.python_version()}; "]
        lines[-1] += ", ".join(f"{name} {version}" for name, version in library_versions().items())
        with suppress(OSError):
            topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout
            lines += ["", "```", topology.strip(), "```"]
        return "\n".join([*lines, "", f"`python {' '.join(sys.argv)}`", ""])

    def _faster(self, part: str, row: dict[str, Any]) -> dict[str, Any]:
        """A row with how many times as fast it is as the first one."""
        key = {"step": "ms a sample", "cache": "images a second", "eval": "seconds to answer"}.get(
            part, "seconds in all"
        )
        ratio = self.rows[part][0][key] / row[key]
        return row | {"times as fast": 1 / ratio if part == "cache" else ratio}


def _markdown(found: Rows) -> list[str]:
    def shown(name: str, value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:.1%}" if name.startswith(("of ", "waiting")) else f"{value:.4g}"

    lines = [[shown(name, value) for name, value in row.items()] for row in found]
    return [f"| {' | '.join(cells)} |" for cells in ([*found[0]], ["---"] * len(found[0]), *lines)]


def make(
    folder: str, model: str, tokenizer: str | None, ranks: list[int], samples: int, images: int, steps: int
) -> None:
    """Write model, frames and run files, and build the cache of the training."""
    place, num_questions = Path(folder), 2 * samples * max(ranks)
    run = make_run(place, model, max(-(-num_questions // 384), 1) * 64, tokenizer and Path(tokenizer))
    data, lines = run.data.train[0].parent, run.data.train[0].read_text().splitlines(keepends=True)
    assert len(lines) >= num_questions, f"{len(lines)} questions, {num_questions} are needed"
    frames = sorted((data / "images").iterdir())
    (data / "many").mkdir(exist_ok=True)
    for number in range(images):  # other bytes at the end make another image for the cache
        copy = frames[number % len(frames)]
        (data / "many" / f"{number:06d}.jpg").write_bytes(copy.read_bytes() + str(number).encode())
    asked = [{"image": f"many/{number:06d}.jpg", "question": "Polyp?", "answer": "no"} for number in range(images)]
    files = {
        "few": "".join(lines[:num_questions]),
        "test": "".join(lines[:samples]),
        "many": "".join(json.dumps(record) + "\n" for record in asked),
    }
    for name, text in files.items():
        write_text(data / f"{name}.jsonl", text)
    values = yaml.safe_load((data / "run.yaml").read_text())
    few, test, many = ({"train": str(data / f"{name}.jsonl")} for name in files)
    for name, changes in {
        "": {"data": few},
        "-many": {"data": many},
        "-study": {"data": few | {"test": test["train"]}, "train": values["train"] | {"steps": steps}},
        "-eval": {
            "data": few | {"test": str(run.data.train[0])},
            "train": values["train"] | {"steps": steps},
            "eval": {"max_new_tokens": 32, "tokens_per_batch": 8192},
            "output": str(place / "study-first" / f"plain-{SEED}"),
        },
    }.items():
        write_text(place / f"{model}{name}.yaml", yaml.safe_dump(values | changes))
    open_run(read_run_file(place / f"{model}.yaml"), TO_BUILD).build()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for model, data, logs and the report")
    parser.add_argument("--model", default="2b", help="as of `lookonce bench step`")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--parts", default="step,cache,study,eval")
    parser.add_argument("--ranks", help="by default 1, 2, 4 and 8, as far as there are GPUs; 1 and 2 on a CPU")
    parser.add_argument("--samples", type=int, default=96, help="samples of a rank in a step")
    parser.add_argument("--images", type=int, default=1600, help="images of the cache")
    parser.add_argument("--steps", type=int, default=60, help="of a training of the study")
    given = parser.parse_args()
    most = torch.cuda.device_count() or 2
    given.ranks = [int(word) for word in (given.ranks or "1,2,4,8").split(",") if given.ranks or int(word) <= most]
    given.folder = given.folder.resolve()
    given.folder.mkdir(parents=True, exist_ok=True)
    Host(given).run()


if __name__ == "__main__":
    if ORDER in os.environ:
        of_rank(*json.loads(os.environ[ORDER]))
    else:
        main()
