"""The commands `lookonce data ...`: records and images. The work is done in `datasets`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lookonce.commands.options import JSON, PATH, SEED, emit, notify
from lookonce.datasets.formats.registry import FORMAT_NAMES
from lookonce.errors import UsageError

RECORDS = click.argument("records", metavar="RECORDS...", type=PATH, nargs=-1, required=True)
IMAGE_ROOT = click.option(
    "--image-root",
    type=PATH,
    help="Folder that image paths are relative to; by default the folder of each records file.",
)
MAX_PIXELS = click.IntRange(1, 100_000_000)


@click.group()
def data() -> None:
    """Prepare, check and convert records.

    \b
    Examples:
      lookonce data prepare kvasir-vqa data/kvasir
      lookonce data audit data/kvasir/train.jsonl data/kvasir/val.jsonl
      lookonce data convert llava.json train.jsonl
    """


@data.command("audit")
@RECORDS
@IMAGE_ROOT
@click.option("--decode", is_flag=True, help="Decode whole images, which finds truncated ones.")
@click.option("--strict", is_flag=True, help="Exit 1 if there is a finding of level error.")
@click.option("--html", type=PATH, metavar="FILE", help="Also write an HTML page with plots and a contact sheet.")
@click.option(
    "--tokenizer", type=PATH, metavar="DIR", help="Also count tokens, with this model folder; it needs no weights."
)
@click.option("--max-pixels", type=MAX_PIXELS, help="Like cache.max_pixels in the run file.")
@click.option(
    "--enable-thinking",
    type=click.Choice(["true", "false"]),
    help="Like data.enable_thinking in the run file; Qwen3.5's chat template needs false.",
)
@JSON
def audit(
    records: tuple[Path, ...],
    image_root: Path | None,
    decode: bool,
    strict: bool,
    html: Path | None,
    tokenizer: Path | None,
    max_pixels: int | None,
    enable_thinking: str | None,
    as_json: bool,
) -> None:
    """Show what is in records, what is wrong with them, and which images the files share.

    Several files are compared as splits. The training split is the file whose name begins with train, else the first.
    Malformed records, missing and broken images, images that several files share, contradictions, and records that
    training refuses are errors. All other findings are warnings or notes. --json lists where each one occurs.

    Without --strict, the exit code is 0 whatever the findings in existing files.

    With --tokenizer, also counts the tokens of records, of images, and of an epoch: with and without shared prefixes,
    in packs (training sequences of images with their questions) and steps of the default sizes.

    \b
    --json has these keys:
      files, num_images, num_questions, num_distinct_questions      how much there is
      findings     code, level, count, says, examples, items (all occurrences)
      leaks        for every two files: file, other, num_images, file_share, other_share, num_renamed,
                   num_asked_in_both, images
      baselines    the majority baseline: learned_on, scored_on, num_right, exact_match
      questions    the 1,000 asked most: num_asked, num_answers, top, majority, majority_share
      questions_per_image, image_sizes                              histograms
      tokens       with --tokenizer: files (record_tokens, num_separate, num_shared, num_packed ...), image_tokens

    \b
    Examples:
      lookonce data audit data/sample/train.jsonl data/sample/val.jsonl data/sample/test.jsonl
      lookonce data audit train.jsonl test.jsonl --image-root images --decode --strict
      lookonce data audit train.jsonl --tokenizer Qwen3-VL-8B-Instruct --html audit.html
      lookonce data audit train.jsonl --tokenizer Qwen3.5-9B --enable-thinking false
      lookonce data audit train.jsonl --json
    """
    from lookonce.datasets.audit.audit import audit as run_audit
    from lookonce.datasets.audit.audit import to_text
    from lookonce.datasets.audit.findings import Corpus

    if tokenizer is None and (max_pixels or enable_thinking):
        raise UsageError(
            "--max-pixels and --enable-thinking are for counting tokens; add --tokenizer DIR, a model folder"
        )
    if html and html.exists() and any(path.exists() and html.samefile(path) for path in records):
        raise UsageError(f"--html {html} is one of the records files; name another file")
    corpus = Corpus.read(records, image_root, decode=decode)
    findings, sections, texts, tokens = [], [], [], {}
    if tokenizer:
        from lookonce.run.sections import BatchSection
        from lookonce.train.data import token_stats

        thinks = None if enable_thinking is None else enable_thinking == "true"
        counter = token_stats.TokenCounter(tokenizer, max_pixels, thinks)
        stats = token_stats.count_tokens(corpus, counter, str(tokenizer), BatchSection())
        findings, sections, texts = (
            token_stats.findings(stats),
            [token_stats.section(stats)],
            [token_stats.to_text(stats)],
        )
        tokens = {"tokens": stats.to_json()}
    report = run_audit(corpus, findings)
    if html:
        from lookonce.datasets.audit.audit import draw_contact_sheet, to_page
        from lookonce.files import write_text

        write_text(html, to_page(report, sections, draw_contact_sheet(corpus)))
        notify(f"wrote the page to {html}")
    emit(report.to_json() | tokens, to_text(report, texts), as_json)
    sys.exit(1 if strict and report.count("error") else 0)


FORMAT = click.Choice(FORMAT_NAMES)


@data.command("convert")
@click.argument("source", metavar="RECORDS", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option("--to", "target_format", type=FORMAT, help="Format to write; by default canonical, in CSV flat.")
@click.option(
    "--format", "source_format", type=FORMAT, help="Format to read; by default recognised from the first record."
)
@click.option(
    "--image-root",
    type=PATH,
    help="Folder that image paths in RECORDS are relative to and may not leave; by default the folder of RECORDS, and "
    "absolute paths may be anywhere.",
)
@click.option(
    "--out-image-root",
    "target_root",
    type=PATH,
    help="Folder that image paths in OUT are relative to; by default the folder of OUT, and images elsewhere get "
    "absolute paths.",
)
@click.option("--coerce-answers", is_flag=True, help="Write answers that are numbers or booleans as text.")
@click.option(
    "--points",
    metavar="FROM:TO",
    help="Change the unit of answers that are points or boxes: pixels, ratio (0 to 1), 1000 (0 to 1000, Qwen3-VL), or "
    "resized (pixels of the image that the model sees, Qwen2.5-VL).",
)
@click.option("--model", type=PATH, metavar="DIR", help="Model folder that resizes images, for --points with resized.")
@click.option("--max-pixels", type=MAX_PIXELS, help="Like cache.max_pixels in the run file, for the same.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@JSON
def convert(
    source: Path,
    target: Path,
    points: str | None,
    model: Path | None,
    max_pixels: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write records in another format.

    The suffix of OUT decides the kind of file: .jsonl, .json (an array), .csv, .tsv or .parquet. Images stay where they
    are; images embedded as data: URLs or lists of bytes are written to images/ beside OUT, byte for byte. If the format
    cannot hold a record, the command fails and OUT is not written. In CSV, a text that a spreadsheet would run as a
    formula has an apostrophe before it, which is removed when the file is read.

    \b
    Formats:
      canonical  images, turns, system, metadata: can hold every record
      flat       image_filename, question, answer: one question about one image; the format of CSV
      llava      image, conversations (LLaVA)
      sharegpt   images, conversations (ShareGPT, as LLaMA-Factory writes it)
      alpaca     images, instruction, input, output (Alpaca, as LLaMA-Factory writes it)
      messages   images, messages with <image> (ms-swift, LLaMA-Factory)
      parts      messages with content parts (Hugging Face, TRL, Axolotl)
      openai     messages with image_url content parts

    \b
    Examples:
      lookonce data convert llava.json train.jsonl
      lookonce data convert train.jsonl swift.jsonl --to messages
      lookonce data convert train.jsonl train.csv
      lookonce data convert chats.jsonl out/train.parquet --to parts --image-root /data/frames
      lookonce data convert clicks.jsonl train.jsonl --points pixels:1000
      lookonce data convert clicks.jsonl train.jsonl --points ratio:resized --model Qwen2.5-VL-7B-Instruct
    """
    from lookonce.datasets.convert import convert as convert_records
    from lookonce.datasets.point_units import Conversion

    if (model or max_pixels) and "resized" not in (points or ""):
        raise UsageError(
            "--model and --max-pixels are for the unit `resized`: --points FROM:resized; or leave them out"
        )
    resized = None
    if model:
        from lookonce.cache.model.pixels import ImageProcessor

        resized = ImageProcessor(model, max_pixels=max_pixels).resized_size
    conversion = Conversion.parse(points, resized) if points else None
    report = convert_records(source, target, points=conversion, **options)
    emit(asdict(report), report.text(), as_json)


@data.command("prepare")
@click.argument("name", metavar="NAME|FILE.yaml")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--source",
    metavar="PATH|OWNER/NAME",
    help="Local folder or file (parquet, metadata.csv and images, JSONL or JSON), or a dataset on the Hub. By default "
    "the definition's dataset on the Hub.",
)
@click.option("--revision", metavar="COMMIT", help="Commit on the Hub; by default the definition's, else that of main.")
@click.option("--image-root", type=PATH, help="Folder of the image files, if they are not beside the rows.")
@click.option(
    "--split",
    metavar="image|official|FILE",
    help="By image, drawn with the seed; the dataset's own; or a JSON file of image names: "
    '{"train": [...], "val": [...], "test": [...]}. By default the definition decides.',
)
@click.option("--seed", type=SEED, help="Seed of the split by image; by default the definition's, 42.")
@click.option(
    "--duplicates",
    type=click.Choice(["merge", "keep", "drop"]),
    help="Rows with the same image and question but different answers: one record with all answers as references "
    "(merge), one record each (keep), or none (drop). By default the definition decides.",
)
@JSON
def data_prepare(name: str, folder: Path, as_json: bool, **options: Any) -> None:
    """Make records and images of a dataset, cleaned and split.

    NAME is kvasir-vqa, kvasir-vqa-x1, vqa-rad, slake or path-vqa, or a YAML file of your own
    (datasets/README.md says how to write one). Writes train.jsonl, val.jsonl, test.jsonl, images/ and report.json into
    DIR. Embedded images are written byte for byte, each once.

    Every change is reported: the table and report.json count what each rule did, and a changed record keeps its
    original texts. If interrupted, run the same command again; it starts over. If DIR is complete, it does nothing.

    \b
    Examples:
      lookonce data prepare kvasir-vqa data/kvasir
      lookonce data prepare kvasir-vqa data/kvasir --source downloads/Kvasir-VQA --json
      lookonce data prepare kvasir-vqa-x1 data/x1-official --split official
      lookonce data prepare my-set.yaml data/mine --source rows.jsonl --image-root frames
    """
    from lookonce.datasets.prepare.run import Options, next_steps, prepare, report_text

    prepared = prepare(name, folder, Options(**options), notify)
    if not prepared.is_new:
        notify(f"{folder} is already prepared from the same source with the same settings; nothing was done")
    emit(prepared.report, report_text(prepared.report), as_json)
    notify(next_steps(folder, prepared.report))
