"""The lengths of records in tokens: which are left out as too long, and which training would refuse."""

from __future__ import annotations

from collections import Counter

from tqdm import tqdm

from lookonce.checks.images import CheckedImages
from lookonce.checks.model import CheckedModel
from lookonce.checks.records import CheckedRecords
from lookonce.checks.report import Result
from lookonce.datasets.records import Record
from lookonce.errors import RecordsError
from lookonce.run.config import RunFile
from lookonce.run.sections.batch import BatchSection
from lookonce.text import count, listed
from lookonce.train.data.token_stats import Distribution, TokenCounter

TRAINED = ("train", "val")
"""The splits whose records must fit a pack; the questions of an evaluation may be of any length."""
NUM_NAMED = 3


def check_tokens(run: RunFile, records: CheckedRecords, model: CheckedModel, images: CheckedImages) -> list[Result]:
    """The lengths of the records that are trained on and validated with."""
    if model.counter is None:
        return []
    results = []
    for split in TRAINED:
        if found := records.by_split[split]:
            results += _check_split(run, split, found, model.counter, images)
    return results


def _check_split(
    run: RunFile, split: str, records: list[Record], counter: TokenCounter, images: CheckedImages
) -> list[Result]:
    lengths: list[tuple[int, str]] = []
    refused: list[str] = []
    for record in tqdm(records, desc=f"count tokens of {split}", unit="record", leave=False, disable=None):
        try:
            example = counter.example(
                record, [""] * len(record.images), [images.tokens.get(p, 0) for p in record.images]
            )
            lengths.append((example.num_tokens, record.origin))
        except RecordsError as error:
            refused.append(str(error))
    results = [_too_long(run.batch, split, lengths)] if lengths else []
    if refused:
        what = f"{split}: training stops at {count(len(refused), 'record')}: {listed(refused, NUM_NAMED)}"
        results.append(Result("error", "lengths", what, "correct or remove these records"))
    return results


def _too_long(batch: BatchSection, split: str, lengths: list[tuple[int, str]]) -> Result:
    limit, key = batch.longest_record, batch.limiting_key
    long = [(number, origin) for number, origin in lengths if number > limit]
    found = Distribution.of(Counter(number for number, _ in lengths))
    if not long:
        what = f"{split}: {found.median:,} tokens in the median, {found.max:,} at most; {limit:,} fit ({key})"
        return Result("ok", "lengths", what)
    named = [f"{origin} with {number:,}" for number, origin in long]
    what = (
        f"{split}: {len(long):,} of {count(len(lengths), 'record')} left out, longer than {limit:,} tokens "
        f"({key}): {listed(named, NUM_NAMED)}"
    )
    limits = {"batch.max_tokens": batch.max_tokens} | (
        {"batch.tokens_per_pack": batch.tokens_per_pack} if batch.has_packs else {}
    )
    raised = " and ".join(f"`{name}`" for name, value in limits.items() if value < found.max)
    return Result(
        "error" if len(long) == len(lengths) else "warning",
        "lengths",
        what,
        f"raise {raised} to {found.max:,}, or lower `cache.max_pixels`",
    )
