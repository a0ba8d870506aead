"""On 8,786 real rows an audit finds what counting finds, and the majority answer in context knows more than without."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

from lookonce.datasets.audit.audit import Audit, audit
from lookonce.datasets.audit.corpus import Corpus, list_questions
from lookonce.datasets.audit.findings import Finding
from lookonce.datasets.audit.report import to_text
from lookonce.datasets.majority import Majority, MajorityInContext
from lookonce.datasets.records import Record, Turn


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
    words = {item["word"]: item["like"] for item in finding_of(result, "spelling").items}
    assert words == {"instrumnets": "instruments", "rigth": "right"}
    assert {">20", ">20mm"} in [set(item["answers"]) for item in finding_of(result, "units").items]
    assert {item["separator"] for item in finding_of(result, "separators").items} == {";", "; "}
    assert {"pink; red", "red; pink"} in [set(item["answers"]) for item in finding_of(result, "label-order").items]
    assert finding_of(result, "images-missing").count == len({row["image_filename"] for row in rows})
    assert result.num_distinct_questions == len({row["question"] for row in rows})
    per_image = Counter(Counter(row["image_filename"] for row in rows).values())
    assert result.questions_per_image == dict(sorted(per_image.items()))
    assert to_text(result).count("cannot read image") == 1


def test_on_real_rows_the_majority_baseline_is_what_counting_gives(real_rows, result):
    by_question: dict[str, Counter[str]] = {}
    for one in list_questions(Corpus.read([real_rows])):
        by_question.setdefault(one.question, Counter())[one.answer] += 1
    right = sum(counts.most_common(1)[0][1] for counts in by_question.values())
    assert result.baselines[0].num_right == right


def test_on_real_rows_it_knows_more_than_the_majority_and_is_quick(real_rows):
    """All questions about an image as one conversation in random order: hardly any was had before."""
    found: dict[str, list[Turn]] = {}
    for line in real_rows.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["image_filename"], []).append(Turn(row["question"], row["answer"]))
    draw = random.Random(0)
    records = [
        Record((), tuple(draw.sample(turns, len(turns)))) for turns in draw.sample([*found.values()], len(found))
    ]
    began, training, test = time.perf_counter(), records[:700], records[700:]
    plain, majority = Majority.of_records(training), MajorityInContext(training)
    asked = [(record.turns[:number], turn) for record in test for number, turn in enumerate(record.turns)]
    scores = [
        mean(majority.answer(before, turn.question) == turn.answer for before, turn in asked),
        mean(plain.answer(turn.question) == turn.answer for _, turn in asked),
    ]
    assert scores == pytest.approx([0.768, 0.647], abs=0.03)
    assert time.perf_counter() - began < 5  # 0.2 s on an idle machine
