"""Token counts for people: tables, a section of the audit's page, and findings."""

from __future__ import annotations

from collections.abc import Sequence

from lookonce.datasets.audit.findings import Finding, findings_from
from lookonce.page import Section
from lookonce.text import count, table
from lookonce.train.data.token_stats import Distribution, TokenStats

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A header and its lines."""


def findings(stats: TokenStats) -> list[Finding]:
    """Records that training would leave out, or stop at."""
    too_long = [item for file in stats.files for item in file.too_long]
    refused = [item for file in stats.files for item in file.refused]
    return [
        *findings_from(
            "refused",
            "error",
            refused,
            f"{count(len(refused), 'record')} that training refuses",
            lambda item: str(item["reason"]),
        ),
        *findings_from(
            "too-long",
            "warning",
            too_long,
            f"{count(len(too_long), 'record')} of more than {stats.batch.longest_record:,} tokens, "
            "which training leaves out",
            lambda item: f"{item['tokens']:,} tokens ({item['place']})",
        ),
    ]


def to_text(stats: TokenStats) -> str:
    """Tables of records, images and epochs."""
    tables = [table(header, lines) for header, lines in _tables(stats)]
    return "\n\n".join([*tables, *([unknown_sizes(stats)] if stats.num_unknown else [])])


def section(stats: TokenStats) -> Section:
    """The same tables for the audit's page, with a plot of tokens per image."""
    says = f"Counted by the code that trains, with {stats.tokenizer}. {unknown_sizes(stats)}"
    return Section("Tokens per image and per epoch", says, _tables(stats), stats.image_tokens, "tokens", "images")


def unknown_sizes(stats: TokenStats) -> str:
    """How images of unknown size were counted; empty if there are none."""
    if not stats.num_unknown:
        return ""
    images = f"{count(stats.num_unknown, 'image')} of unknown size"
    if stats.assumed is None:
        return f"{images} counted as no tokens, so only text is counted; set their tokens with `--image-tokens 400`"
    return f"{images} counted as {stats.assumed:,} tokens each (`--image-tokens`)"


def _tables(stats: TokenStats) -> list[Table]:
    distribution = ("mean", "median", "99 %", "most")
    records = [
        (file.file, *_cells(file.record_tokens), f"{file.num_supervised:,}", f"{len(file.too_long):,}")
        for file in stats.files
    ]
    epochs = [
        (
            file.file,
            f"{file.num_separate:,}",
            f"{file.num_shared:,}",
            f"{file.num_packed:,}",
            f"{file.num_packs:,}",
            f"{file.times:.1f}",
        )
        for file in stats.files
    ]
    steps = f"in steps of {stats.batch.samples_per_step}"
    images = [(("tokens per image", *distribution), [("all files", *_cells(Distribution.of(stats.image_tokens)))])]
    return [
        (("tokens per record", *distribution, "supervised in all", "too long"), records),
        *(images if stats.image_tokens else []),
        (("tokens per epoch", "separate", "shared prefix", steps, "packs", "times fewer"), epochs),
    ]


def _cells(numbers: Distribution) -> tuple[str, ...]:
    return f"{numbers.mean:,.1f}", f"{numbers.median:,}", f"{numbers.p99:,}", f"{numbers.max:,}"
