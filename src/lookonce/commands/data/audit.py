"""`lookonce data audit`: what is in records. What the command does is in `datasets.audit`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce.commands.data.group import COERCE, IMAGE_ROOT, RECORDS, data
from lookonce.commands.options import JSON, PATH, SEED, emit, notify
from lookonce.errors import UsageError

if TYPE_CHECKING:
    from lookonce.datasets.audit.corpus import Corpus
    from lookonce.train.data.token_stats import TokenStats

TOKENS = click.IntRange(1, 1_000_000)


@data.command("audit")
@RECORDS
@IMAGE_ROOT
@COERCE
@click.option("--decode", is_flag=True, help="Decode whole images, which finds truncated ones.")
@click.option("--strict", is_flag=True, help="Exit 1 if there is a finding of level error.")
@click.option("--html", type=PATH, metavar="FILE", help="Also write an HTML page with plots and a contact sheet.")
@click.option(
    "--seed", type=SEED, default=0, show_default=True, help="Seed that draws the images of the contact sheet."
)
@click.option(
    "--tokenizer", type=PATH, metavar="DIR", help="Also count tokens, with this model folder; it needs no weights."
)
@click.option("--image-tokens", type=TOKENS, help="Tokens that each missing image counts.")
@click.option("--max-pixels", type=click.IntRange(1, 100_000_000), help="Like cache.max_pixels in the run file.")
@click.option(
    "--enable-thinking",
    type=click.Choice(["true", "false"]),
    help="Like data.enable_thinking in the run file; Qwen3.5's chat template needs false.",
)
@click.option("--samples-per-step", type=TOKENS, help="Like batch.samples_per_step in the run file.")
@click.option("--tokens-per-pack", type=TOKENS, help="Like batch.tokens_per_pack in the run file.")
@click.option("--max-tokens", type=TOKENS, help="Like batch.max_tokens in the run file; longer records are left out.")
@JSON
def audit(
    records: tuple[Path, ...],
    image_root: Path | None,
    coerce_answers: bool,
    decode: bool,
    strict: bool,
    html: Path | None,
    seed: int,
    tokenizer: Path | None,
    image_tokens: int | None,
    max_pixels: int | None,
    enable_thinking: str | None,
    as_json: bool,
    **batch: int | None,
) -> None:
    """Show what is in records, what is wrong with them, and which images the files share.

    Several files are compared as splits. The one whose name begins with train, else the first, is trained on. Malformed
    records, missing and broken images, images that several files share, contradictions, and records that training
    refuses are errors. All other findings are warnings or notes. `lookonce data clean` leaves out malformed records and
    those of broken images.

    The exit code is 0 whatever is found in files that exist, unless --strict is given.

    With --tokenizer, also counts the tokens of records, of images, and of an epoch with and without shared prefixes.

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

    if tokenizer is None and (image_tokens or max_pixels or enable_thinking or any(batch.values())):
        raise UsageError("counting tokens needs a tokenizer: give a model folder with --tokenizer DIR")
    corpus = Corpus.read(records, image_root, decode=decode, coerce_answers=coerce_answers)
    report = run_audit(corpus)
    thinks = None if enable_thinking is None else enable_thinking == "true"
    stats = _token_stats(corpus, tokenizer, image_tokens, max_pixels, thinks, batch) if tokenizer else None
    sections, texts, tokens = [], [], {}
    if stats:
        from lookonce.train.data import token_report

        report = report.with_findings(token_report.findings(stats))
        sections, texts = [token_report.section(stats)], [token_report.to_text(stats)]
        tokens = {"tokens": stats.to_json()}
    if html:
        from lookonce.datasets.audit.contact_sheet import draw_contact_sheet
        from lookonce.datasets.audit.page import to_page
        from lookonce.files import write_text

        write_text(html, to_page(report, sections, draw_contact_sheet(corpus, seed)))
        notify(f"wrote the page to {html}")
    emit(report.to_json() | tokens, to_text(report, texts), as_json)
    sys.exit(1 if strict and report.count("error") else 0)


def _token_stats(
    corpus: Corpus,
    tokenizer: Path,
    image_tokens: int | None,
    max_pixels: int | None,
    thinks: bool | None,
    batch: dict[str, int | None],
) -> TokenStats:
    from lookonce.run.sections.batch import BatchSection
    from lookonce.train.data.token_stats import TokenCounter, count_tokens

    section = BatchSection.model_validate({name: value for name, value in batch.items() if value})
    counter = TokenCounter(tokenizer, max_pixels, thinks)
    return count_tokens(corpus, counter, str(tokenizer), section, image_tokens)
