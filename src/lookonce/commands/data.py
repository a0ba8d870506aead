"""The commands `lookonce data ...`: records and images. The work is done in `datasets`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookonce.commands.options import JSON, PATH, SEED, emit, notify
from lookonce.datasets.formats.registry import FORMAT_NAMES
from lookonce.errors import UsageError

if TYPE_CHECKING:
    from lookonce.datasets.audit.corpus import Corpus
    from lookonce.train.data.token_stats import TokenStats


RECORDS = click.argument("records", metavar="RECORDS...", type=PATH, nargs=-1, required=True)
IMAGE_ROOT = click.option(
    "--image-root",
    type=PATH,
    help="Folder that image paths are relative to; by default the folder of each records file.",
)


@click.group()
def data() -> None:
    """Prepare, convert, check and clean records, and put their images into tar shards.

    \b
    Examples:
      lookonce data prepare kvasir-vqa data/kvasir
      lookonce data audit data/kvasir/train.jsonl data/kvasir/val.jsonl
      lookonce data clean train.jsonl train-clean.jsonl
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
@click.option("--max-pixels", type=click.IntRange(1, 100_000_000), help="Like cache.max_pixels in the run file.")
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

    Several files are compared as splits. The one whose name begins with train, else the first, is trained on. Malformed
    records, missing and broken images, images that several files share, contradictions, and records that training
    refuses are errors. All other findings are warnings or notes. `lookonce data clean` leaves out malformed records and
    those of broken images.

    The exit code is 0 whatever is found in files that exist, unless --strict is given.

    With --tokenizer, also counts the tokens of records, of images, and of an epoch with and without shared prefixes, in
    packs and steps of the default sizes.

    \b
    --json has these keys:
      files, num_images, num_questions, num_distinct_questions      how much there is
      findings     code, level, count, says, examples, items (all occurrences)
      leaks        for every two files: one, other (shares), num_images, num_renamed, num_asked_in_both, images
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
    from lookonce.datasets.audit.corpus import Corpus
    from lookonce.datasets.audit.report import to_text

    if tokenizer is None and (max_pixels or enable_thinking):
        raise UsageError("counting tokens needs a tokenizer: give a model folder with --tokenizer DIR")
    corpus = Corpus.read(records, image_root, decode=decode)
    report = run_audit(corpus)
    thinks = None if enable_thinking is None else enable_thinking == "true"
    stats = _token_stats(corpus, tokenizer, max_pixels, thinks) if tokenizer else None
    sections, texts, tokens = [], [], {}
    if stats:
        from lookonce.train.data import token_stats

        report = report.with_findings(token_stats.findings(stats))
        sections, texts = [token_stats.section(stats)], [token_stats.to_text(stats)]
        tokens = {"tokens": stats.to_json()}
    if html:
        from lookonce.datasets.audit.report import draw_contact_sheet, to_page
        from lookonce.files import write_text

        write_text(html, to_page(report, sections, draw_contact_sheet(corpus)))
        notify(f"wrote the page to {html}")
    emit(report.to_json() | tokens, to_text(report, texts), as_json)
    sys.exit(1 if strict and report.count("error") else 0)


def _token_stats(corpus: Corpus, tokenizer: Path, max_pixels: int | None, thinks: bool | None) -> TokenStats:
    from lookonce.run.sections import BatchSection
    from lookonce.train.data.token_stats import TokenCounter, count_tokens

    return count_tokens(corpus, TokenCounter(tokenizer, max_pixels, thinks), str(tokenizer), BatchSection())


@data.command("clean")
@click.argument("source", metavar="RECORDS", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option(
    "--image-root",
    type=PATH,
    help="Folder that image paths are relative to and may not leave, in both files; by default the folder of RECORDS.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@JSON
def clean(
    source: Path,
    target: Path,
    image_root: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the records without malformed ones and without those of broken images.

    Leaves out what `lookonce data audit` reports as malformed records, and the records of images that are missing or
    cannot be decoded. Lines of JSONL that are kept have the same bytes; other files are written in the canonical
    format, CSV in the flat one. If nothing is left, the command fails and OUT is not written.

    \b
    --json has these keys:
      source, target, num_records, num_kept, num_malformed, num_with_unusable_images, num_coerced,
      left_out_columns
      malformed    by kind: kind, reason (of the first), places
      images       path, reason, places

    \b
    Examples:
      lookonce data clean train.jsonl train-clean.jsonl
      lookonce data clean train.jsonl train-clean.jsonl --image-root images --json
    """
    from lookonce.datasets.rewrite import clean as clean_records

    report = clean_records(source, target, image_root, overwrite=overwrite)
    emit(report.to_json(), report.text(), as_json)


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
@click.option(
    "--split",
    "shares",
    metavar="val=0.1,test=0.1",
    help="Divide the records by image: write OUT.train.jsonl and OUT.val.jsonl, OUT.test.jsonl in place of OUT.jsonl. "
    "Shares are of the images; train has the rest.",
)
@click.option("--seed", type=SEED, default=42, show_default=True, help="Seed that draws the images of --split.")
@click.option(
    "--together",
    multiple=True,
    metavar="KEY",
    help="With --split: records with the same value of this metadata key, such as a patient, stay in one part.",
)
@click.option("--coerce-answers", is_flag=True, help="Write answers that are numbers or booleans as text.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@JSON
def convert(
    source: Path,
    target: Path,
    shares: str | None,
    seed: int,
    together: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Write records in another format, or divide them into train, val and test.

    The suffix of OUT decides the kind of file: .jsonl, .json (an array), .csv, .tsv or .parquet. Images stay where they
    are; images embedded as data: URLs, base64 or lists of bytes are written to images/ beside OUT, byte for byte. If
    the format cannot hold a record, the command fails and OUT is not written. In CSV, a text that a spreadsheet would
    run as a formula has an apostrophe before it, which is removed when the file is read.

    With --split no image is in two of the files: images are known by their content, and those that a record shows
    together stay together.

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
      lookonce data convert own.jsonl data/own.jsonl --split val=0.1,test=0.1 --together patient
    """
    from lookonce.datasets.rewrite import Division, parse_shares
    from lookonce.datasets.rewrite import convert as convert_records
    from lookonce.errors import UsageError

    if together and shares is None:
        raise UsageError("--together keeps records in one part of --split; name the shares with --split val=0.1")

    division = None if shares is None else Division(parse_shares(shares), seed, together)
    report = convert_records(source, target, division=division, notify=notify, **options)
    emit(asdict(report), report.text(), as_json)


@data.command("prepare")
@click.argument("name", metavar="NAME|FILE.yaml")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--source",
    metavar="PATH|OWNER/NAME",
    help="Local folder or file (parquet, metadata.csv and images, JSONL, JSON, or WebDataset tars), or a dataset on "
    "the Hub. By default the definition's dataset on the Hub.",
)
@click.option("--revision", metavar="COMMIT", help="Commit on the Hub; by default the definition's, else that of main.")
@click.option(
    "--format",
    type=click.Choice(["text", "parquet", "tar", "csv", "json"]),
    help="File format to read, if the source has several.",
)
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
@click.option(
    "--variants",
    "num_variants",
    default=0,
    show_default=True,
    type=click.IntRange(0, 100),
    help="Add each question for this many augmented variants of its image.",
)
@JSON
def data_prepare(name: str, folder: Path, as_json: bool, **options: Any) -> None:
    """Make records and images of a dataset, cleaned and split.

    NAME is kvasir-vqa, kvasir-vqa-x1, endovis18-vqa, vqa-rad, slake or path-vqa, or a YAML file of your own
    (datasets/README.md says how to write one). Writes train.jsonl, val.jsonl, test.jsonl, images/ and report.json into
    DIR. Embedded images are written byte for byte, each once.

    Every change is reported: the table and report.json count what each rule did, and a changed record keeps its
    original texts. If interrupted, run the same command again, which begins from the start; on a complete DIR it does
    nothing.

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


@data.command("tar")
@RECORDS
@click.argument("folder", metavar="DIR", type=PATH)
@IMAGE_ROOT
@click.option(
    "--tar-mb",
    default=256,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Megabytes of images per tar shard.",
)
@click.option("--skip-missing", is_flag=True, help="Leave out records whose images are missing or broken.")
@click.option("--questions", "with_questions", is_flag=True, help="Add a JSON file with its questions to each image.")
@JSON
def tar(
    records: tuple[Path, ...],
    folder: Path,
    image_root: Path | None,
    tar_mb: int,
    skip_missing: bool,
    with_questions: bool,
    as_json: bool,
) -> None:
    """Write images into WebDataset tar shards, and records that point into them.

    Each distinct image is written once, its bytes unchanged, in the order in which a cache reads them; all records
    files share the tar shards. The records in DIR have the names of those given. A cache built from them is the same.

    If interrupted, run the same command again to resume.

    \b
    Examples:
      lookonce data tar data/sample/train.jsonl data/sample/val.jsonl data/sample/tars
      lookonce data tar train.jsonl /scratch/tars --image-root images --tar-mb 500 --skip-missing
    """
    from lookonce.datasets.tar_shards import write_tar_shards

    report = write_tar_shards(
        records,
        folder,
        image_root,
        tar_bytes=tar_mb * 1_000_000,
        skip_missing=skip_missing,
        with_questions=with_questions,
    )
    emit(report.to_json(), report.text(), as_json)
