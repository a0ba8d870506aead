"""Write what the comparison with other tools trains: one model with random weights, frames, records, and run files.

    python benchmarks/peers/make_data.py --model 2b --tokenizer Qwen3-VL-tokenizer

Under `--place`: `images/`, `q1.jsonl` ... `q10.jsonl` with that many questions about each image, `tokens.json` with the
tokens of each record, and for each model a folder with the model (as transformers loads it) and a run file for each
number of questions. The cache is built too. Every tool trains the records in the order of the file, 96 a step, so all
take the same steps. Frames have the sizes of Kvasir-VQA, each in its share, and questions are those of `lookonce
sample`. A folder that exists is completed: another model can be added later.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import yaml

from lookonce.datasets.records import Record, Turn, write_records
from lookonce.datasets.sample.model import write_model
from lookonce.datasets.sample.scene import KINDS, KVASIR_SIZES, NUM_QUESTIONS, ask, draw, make_scenes, stratify_sizes
from lookonce.datasets.sample.write import SIZED_JPEG_QUALITY
from lookonce.files import threaded_map
from lookonce.run.config import read_run_file
from lookonce.run.open import TO_BUILD, open_run

SAMPLES_PER_STEP = 96
QUESTIONS = (1, 2, 4, 10)
SEED = 3
FOR_PROCESSORS = ("video_preprocessor_config.json",)
"""Files of a published model that `AutoProcessor` asks for, beside those of a tokenizer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", type=Path, default=Path("peers"))
    parser.add_argument("--model", default="2b")
    parser.add_argument("--tokenizer", type=Path, help="a folder with the published tokenizer; default: a small one")
    parser.add_argument("--images", type=int, default=SAMPLES_PER_STEP)
    given = parser.parse_args()
    place, model = given.place.absolute(), given.place.absolute() / given.model
    if not (place / "images").exists():
        write_data(place, given.images)
    if not (model / "model").exists():
        write_model(model / "model", given.model, tokenizer=given.tokenizer)
        for name in FOR_PROCESSORS:
            if given.tokenizer and (given.tokenizer / name).exists():
                shutil.copyfile(given.tokenizer / name, model / "model" / name)
    tokens = {}
    for number in QUESTIONS:
        path = model / f"q{number}.yaml"
        path.write_text(yaml.safe_dump(run_file(place, model, number), sort_keys=False))
        opened = open_run(read_run_file(path), TO_BUILD)
        opened.build()  # all of them have the same images
        tokens[f"q{number}"] = [example.num_tokens for example in opened.examples("train")[0]]
    (place / "tokens.json").write_text(json.dumps(tokens))
    means = {name: round(sum(numbers) / len(numbers), 1) for name, numbers in tokens.items()}
    print(json.dumps({"model": given.model, "images": given.images, "tokens a sample": means}))


def write_data(place: Path, num_images: int) -> None:
    """Write frames, and records with some of the questions about each; the frames' order is drawn."""
    place.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in KINDS if kind != "normal"]  # about normal ones there is one question
    scenes = [*enumerate(make_scenes(SEED, num_images, kinds))]
    random.Random(SEED).shuffle(scenes)
    all_asked = [(number, replace(scene, num_questions=NUM_QUESTIONS)) for number, scene in scenes]
    frames = [*dict(stratify_sizes(all_asked, KVASIR_SIZES, SEED)).items()]
    random.Random(SEED).shuffle(frames)
    (place / "images").mkdir()
    paths = [place / "images" / f"frame-{number:04d}.jpg" for number, _ in frames]
    for path, frame in zip(paths, threaded_map(draw, [scene for _, scene in frames]), strict=True):
        frame.save(path, quality=SIZED_JPEG_QUALITY)
    for wanted in QUESTIONS:
        records = [
            Record(images=(path,), turns=(Turn(*pair),), metadata={"image_id": path.stem})
            for path, (_, scene) in zip(paths, frames, strict=True)
            for pair in ask(replace(scene, num_questions=wanted))
        ]
        write_records(place / f"q{wanted}.jsonl", records)


def run_file(place: Path, model: Path, num_questions: int) -> dict[str, object]:
    return {
        "model": {"path": str(model / "model")},
        "data": {"train": str(place / f"q{num_questions}.jsonl")},
        "cache": {"dir": str(place / "caches")},
        "batch": {"samples_per_step": SAMPLES_PER_STEP, "order": "as_given"},
        "train": {"learning_rate": 1e-5},
        "output": str(model / f"run-q{num_questions}"),
    }


if __name__ == "__main__":
    main()
