"""Labels are the same whatever their order, separators and case."""

from __future__ import annotations

import json
import random
import time

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import TEXT

from lookonce.cli import main
from lookonce.datasets.audit.findings import plain, same_labels


@given(st.lists(st.sampled_from(["red", "pink", "Flesh", "blue green"]), min_size=1), st.randoms(use_true_random=False))
def test_order_separators_and_case_leave_labels_the_same(labels, rng: random.Random):
    shuffled = rng.sample(labels, len(labels))
    written = rng.choice([";", "; ", " ; "]).join(label.upper() if rng.random() < 0.5 else label for label in shuffled)
    assert same_labels(written) == same_labels("; ".join(labels))


@given(TEXT)
def test_plain_text_stays_unchanged(text):
    assert plain(plain(text)) == plain(text)


@pytest.mark.parametrize("part", ["\n", " ", "; ", "a;", "1 ", "1a", "e\u0301", "a ", "?", " ;\t"])
def test_an_audit_of_long_texts_takes_linear_time(tmp_path, part):
    long = f"x{part * (200_000 // len(part))}x"
    rows = [
        {"image": "a.png", "question": "Is it?", "answer": long},
        {"image": "a.png", "question": long, "answer": "a"},
    ]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = time.process_time()
    result = CliRunner().invoke(main, ["data", "audit", str(tmp_path / "r.jsonl"), "--html", str(tmp_path / "a.html")])
    assert result.exit_code == 0 and time.process_time() - start < 3
