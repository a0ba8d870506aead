"""On 8,786 real rows an audit finds what counting finds."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from lookonce.datasets.audit.audit import Audit, audit
from lookonce.datasets.audit.corpus import Corpus
from lookonce.datasets.audit.findings import Finding
from lookonce.datasets.audit.report import to_text


@pytest.fixture(scope="module")
def result(real_rows: Path) -> Audit:
    return audit(Corpus.read([real_rows]))


def finding_of(result: Audit, code: str) -> Finding:
    """The only finding with a code."""
    [finding] = [finding for finding in result.findings if finding.code == code]
    return finding


def test_real_rows_have_the_findings_that_counting_gives(real_rows, result):
    rows = [json.loads(line) for line in real_rows.read_text().splitlines()]
    asked_twice: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        asked_twice.setdefault((row["image_filename"], row["question"]), []).append(row["answer"])
    repeated = [answers for answers in asked_twice.values() if len(answers) > 1]
    differing = sum(len({frozenset(re.split("; ?", answer)) for answer in answers}) > 1 for answers in repeated)
    assert differing and finding_of(result, "contradictions").count == differing
    assert finding_of(result, "duplicates").count == len(repeated) - differing
    assert finding_of(result, "missing-values").count == sum(row["question"] == "none" for row in rows) > 0
    assert finding_of(result, "images-missing").count == len({row["image_filename"] for row in rows})
    assert result.num_distinct_questions == len({row["question"] for row in rows})
    per_image = Counter(Counter(row["image_filename"] for row in rows).values())
    assert result.questions_per_image == dict(sorted(per_image.items()))
    assert to_text(result).count("cannot read image") == 1
