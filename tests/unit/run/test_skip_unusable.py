"""Records of unusable images: refused with advice by default, left out and named with `data.skip_unusable`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.errors import FeaturesMissing, ImageError
from lookonce.run.open import FROM_CACHE, TO_BUILD, TO_LOOK, open_run
from lookonce.status import RunStatus

GOOD, BAD, MISSING = ("a.png", "b.png"), "text.png", "nowhere.png"


def line(name: str, answer: object = "yes") -> str:
    return json.dumps({"image_filename": name, "question": "Is it?", "answer": answer}) + "\n"


@pytest.fixture
def write(site, tmp_path, files_are_old):
    """Images, one that cannot be decoded, and a function that writes a records file about some of them."""
    for number, name in enumerate(GOOD):
        site.noise(name, number)
    (tmp_path / BAD).write_bytes(b"not an image")

    def write(*names, answer="yes"):
        path = tmp_path / f"{'-'.join(names)}.jsonl"
        path.write_text("".join(line(name, answer) for name in names))
        return str(path)

    return write


def make(make_run, train, **data):
    return make_run(data={"train": train, "val": [], "test": []} | data)


@pytest.mark.parametrize(("name", "reason"), [(BAD, "cannot decode"), (MISSING, "No such file")])
def test_by_default_an_unusable_image_is_refused_with_the_key_that_leaves_it_out(make_run, write, name, reason):
    """One bad image blocked a training, and the message did not say that there is another way."""
    run = make(make_run, write(*GOOD, name))
    open_run(run, TO_BUILD).build()
    with pytest.raises(FeaturesMissing, match=f"{reason}.*; repair the file, or leave .* `data.skip_unusable: true`"):
        open_run(run, FROM_CACHE).open_cache()


@pytest.mark.parametrize("verify", [False, True])
def test_its_records_are_left_out_counted_and_named(make_run, write, tmp_path, verify):
    run = make(make_run, write(GOOD[0], BAD, GOOD[1], MISSING, BAD), val=write(BAD, GOOD[0]), skip_unusable=True)
    open_run(run, TO_BUILD).build()
    inputs = open_run(run, replace(FROM_CACHE, images="hashed")) if verify else open_run(run, FROM_CACHE)
    assert {split: [r.images[0].name for r in some] for split, some in inputs.records.items()} == {
        "train": [*GOOD],
        "val": [GOOD[0]],
        "test": [],
    }
    train, val = inputs.notes
    assert train.startswith("left out 3 of 5 train records, which show 2 unusable images:")
    assert f"{tmp_path / MISSING}: No such file" in train and "not an image" not in val
    assert val.startswith("left out 1 of 2 val records, which show 1 unusable image:")
    assert len(inputs.open_cache()) == 2


def test_the_run_is_the_same_as_one_without_these_records(make_run, write):
    skipping = make(make_run, write(*GOOD, BAD, MISSING), skip_unusable=True)
    open_run(skipping, TO_BUILD).build()
    clean = make(make_run, write(*GOOD))
    assert open_run(skipping, FROM_CACHE).identity() == open_run(clean, FROM_CACHE).identity()


def test_an_image_that_no_build_has_tried_is_still_an_error(make_run, write, site):
    open_run(make(make_run, write(*GOOD)), TO_BUILD).build()
    site.noise("new.png", 9)
    with pytest.raises(FeaturesMissing, match="does not know 1 of 3 images.*run: lookonce cache build"):
        open_run(make(make_run, write(*GOOD, "new.png"), skip_unusable=True), FROM_CACHE)


def test_a_split_is_not_left_empty(make_run, write):
    run = make(make_run, write(BAD), val=write(*GOOD), skip_unusable=True)
    open_run(run, TO_BUILD).build()
    with pytest.raises(ImageError, match="no training record is left with `data.skip_unusable`; left out 1 of 1 train"):
        open_run(run, FROM_CACHE)


def test_a_repaired_image_is_used_after_the_next_build(make_run, write, site, backdate):
    run = make(make_run, write(*GOOD, MISSING), skip_unusable=True)
    open_run(run, TO_BUILD).build()
    backdate(site.noise(MISSING, 7), 60)
    open_run(run, TO_BUILD).build()
    assert len(open_run(run, FROM_CACHE).records["train"]) == 3 and open_run(run, FROM_CACHE).notes == []


@pytest.mark.parametrize("skip", [False, True])
def test_status_says_what_happens_to_them(make_run, write, skip):
    run = make(make_run, write(*GOOD, BAD, MISSING), skip_unusable=skip)
    open_run(run, TO_BUILD).build()
    notes = "\n".join(RunStatus.open(run).read().notes)
    assert ("left out 2 of 4 train records" in notes) == skip
    assert ("training needs all images: repair the file, or leave" in notes) == (not skip)


def test_status_recognises_the_run_that_left_them_out(make_run, write):
    run = make(make_run, write(*GOOD, BAD, MISSING), skip_unusable=True)
    open_run(run, TO_BUILD).build()
    inputs = open_run(run, FROM_CACHE)
    assert open_run(run, replace(TO_LOOK, records="used")).records_identity() == inputs.records_identity()


def test_answers_that_were_coerced_are_counted_once_for_each_split(make_run, write):
    run = make(make_run, write(*GOOD, answer=3), val=write(GOOD[1], answer=True), coerce_answers=True)
    open_run(run, TO_BUILD).build()
    inputs = open_run(run, FROM_CACHE)
    assert [record.turns[0].answer for record in inputs.all_records()] == ["3", "3", "true"]
    assert [note.partition(" read as text")[0] for note in inputs.notes] == ["2 train answers", "1 val answer"]
    assert RunStatus.open(run).read().notes[:2] == [*inputs.notes]


@pytest.mark.parametrize("words", [("train",), ("cache", "build"), ("cache", "plan"), ("bench", "step")])
@pytest.mark.parametrize(
    ("key", "message"),
    [("data.train", "no records file at /nowhere/x; check the path"), ("model.path", "no model folder at /")],
)
def test_wrong_paths_are_found_before_the_slow_imports(make_run, tmp_path, monkeypatch, words, key, message):
    """They were reported after 5 to 8 seconds."""
    for name in ("torch", "lookonce.workflow", "lookonce.run.open", "lookonce.bench.step"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    (tmp_path / "run.yaml").write_text(make_run().model_dump_json())
    done = CliRunner().invoke(main, [*words, str(tmp_path / "run.yaml"), "--set", f"{key}=/nowhere/x"])
    assert message in done.stderr and done.exit_code == 1
