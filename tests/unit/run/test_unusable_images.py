"""Records of unusable images are refused, with the command that leaves them out."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.errors import FeaturesMissing
from lookonce.run.open import FROM_CACHE, TO_BUILD, open_run
from lookonce.status import find_state

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
def test_an_unusable_image_is_refused_with_the_command_that_lists_its_records(make_run, write, name, reason):
    """One bad image blocked a training, and the message did not say that there is another way."""
    run = make(make_run, write(*GOOD, name))
    open_run(run, TO_BUILD).build()
    advice = r"repair the file, or remove .*: lookonce data audit RECORDS --decode"
    with pytest.raises(FeaturesMissing, match=rf"{name} .*jsonl:3\).*{reason}.*; {advice}"):
        open_run(run, FROM_CACHE).open_cache()


def test_status_says_what_to_do_about_them(make_run, write):
    run = make(make_run, write(*GOOD, BAD, MISSING))
    open_run(run, TO_BUILD).build()
    assert "training needs all images: repair the file, or remove" in "\n".join(find_state(run).notes)


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
