"""`lookonce data audit|pack`: what is in records, and packing their images. What they do is in `datasets`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce.commands.data import data
from lookonce.commands.options import JSON, PATH, emit, notify
from lookonce.errors import UsageError

if TYPE_CHECKING:
    from lookonce.datasets.audit.corpus import Material
    from lookonce.train.data.token_stats import Costs

RECORDS = click.argument("records", metavar="RECORDS...", type=PATH, nargs=-1, required=True)
IMAGE_ROOT = click.option(
    "--image-root", type=PATH, help="What image paths are relative to; by default each records file's own folder."
)
COUNT = click.IntRange(1)


@data.command("audit")
@RECORDS
@IMAGE_ROOT
@click.option("--decode", is_flag=True, help="Decode every image whole: finds those that are cut short.")
@click.option("--strict", is_flag=True, help="Exit 1 if there is an error, as the report calls it.")
@click.option("--html", type=PATH, metavar="FILE", help="Write a page with plots and a contact sheet.")
@click.option("--seed", default=0, show_default=True, help="Which images the contact sheet shows.")
@click.option("--tokenizer", type=PATH, metavar="DIR", help="A model's folder, weights not needed: count tokens too.")
@click.option("--image-tokens", type=COUNT, help="What an image counts that is not there.")
@click.option("--max-pixels", type=COUNT, help="As the run file's cache.max_pixels.")
@click.option("--samples-per-step", type=COUNT, help="As the run file's batch.samples_per_step.")
@click.option("--tokens-per-pack", type=COUNT, help="As the run file's batch.tokens_per_pack.")
@click.option("--max-tokens", type=COUNT, help="As the run file's batch.max_tokens: longer records are left out.")
@JSON
def audit(
    records: tuple[Path, ...],
    image_root: Path | None,
    decode: bool,
    strict: bool,
    html: Path | None,
    seed: int,
    tokenizer: Path | None,
    image_tokens: int | None,
    max_pixels: int | None,
    as_json: bool,
    **batch: int | None,
) -> None:
    """Show what is in records, what is wrong with it, and what leaks between files.

    Several files are taken as splits: the one whose name begins with train, or else the first, as what is trained on.
    Errors are images that are missing or broken, images that files share, contradictions, and records that training
    refuses; all else is a warning or a note.

    Exits 0 whatever it finds, but for --strict.

    With --tokenizer also tokens: of records, of images, and of an epoch with and without the shared prefix.

    \b
    --json has these keys:
      files, num_images, num_questions, num_distinct_questions      how much there is
      findings     code, level, count, says, examples, items (every place)
      leaks        for every two files: one, other (shares), num_images, num_renamed, num_asked_in_both, images
      baselines    learned_on, scored_on, num_right, exact_match of always the majority answer
      questions    the 1,000 asked most: num_asked, num_answers, top, majority, majority_share
      questions_per_image, image_sizes                              histograms
      tokens       with --tokenizer: files (record_tokens, num_separate, num_shared, num_packed ...), image_tokens

    \b
    Examples:
      lookonce data audit data/sample/train.jsonl data/sample/val.jsonl data/sample/test.jsonl
      lookonce data audit train.jsonl test.jsonl --image-root images --decode --strict
      lookonce data audit train.jsonl --tokenizer Qwen3-VL-8B-Instruct --html audit.html
      lookonce data audit train.jsonl --json
    """
    from lookonce.datasets.audit.audit import audit as look
    from lookonce.datasets.audit.corpus import Material
    from lookonce.datasets.audit.report import to_text

    if tokenizer is None and (image_tokens or max_pixels or any(batch.values())):
        raise UsageError("tokens are counted with a tokenizer: name a model's folder with --tokenizer DIR")
    material = Material.read(records, image_root, decode=decode)
    report = look(material)
    costs = _costs(material, tokenizer, image_tokens, max_pixels, batch) if tokenizer else None
    if costs:
        report = report.with_findings(costs.findings())
    if html:
        from lookonce.datasets.audit.page import to_page
        from lookonce.datasets.audit.sheet import draw_sheet
        from lookonce.files import write_text

        sections = [costs.section()] if costs else []
        write_text(html, to_page(report, sections, draw_sheet(material, seed)))
        notify(f"the page is in {html}")
    value = report.to_json() | ({"tokens": costs.to_json()} if costs else {})
    emit(value, to_text(report, [costs.text()] if costs else []), as_json)
    sys.exit(1 if strict and report.count("error") else 0)


def _costs(
    material: Material,
    tokenizer: Path,
    image_tokens: int | None,
    max_pixels: int | None,
    batch: dict[str, int | None],
) -> Costs:
    from lookonce.run.config import BatchSection
    from lookonce.train.data.token_stats import Ruler, measure

    section = BatchSection.model_validate({name: value for name, value in batch.items() if value})
    return measure(material, Ruler(tokenizer, max_pixels), str(tokenizer), section, image_tokens)


@data.command("pack")
@RECORDS
@click.argument("folder", metavar="DIR", type=PATH)
@IMAGE_ROOT
@click.option("--tar-mb", default=256, show_default=True, type=COUNT, help="Megabytes of images a tar.")
@click.option("--skip-missing", is_flag=True, help="Leave records out whose images are missing or broken.")
@click.option("--questions", is_flag=True, help="Put a JSON file with its questions beside each image.")
@JSON
def pack(
    records: tuple[Path, ...],
    folder: Path,
    image_root: Path | None,
    tar_mb: int,
    skip_missing: bool,
    questions: bool,
    as_json: bool,
) -> None:
    """Pack images into WebDataset tars, records beside them.

    Each distinct image once, its bytes unchanged, in the order in which a cache reads them; several records files share
    them. The records in DIR have the names of those given and point into the tars. A cache made from them is the same.

    Interrupted, the same command goes on where it stopped.

    \b
    Examples:
      lookonce data pack data/sample/train.jsonl data/sample/val.jsonl data/sample/packed
      lookonce data pack train.jsonl /scratch/packed --image-root images --tar-mb 500 --skip-missing
    """
    from lookonce.datasets.tar_images import pack as write_pack

    report = write_pack(
        records,
        folder,
        image_root,
        tar_bytes=tar_mb * 1_000_000,
        skip_missing=skip_missing,
        with_questions=questions,
    )
    emit(report.to_json(), report.text(), as_json)
