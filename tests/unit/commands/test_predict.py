"""`lookonce predict`: options that do not fit together."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from lookonce.cli import main


def refusal(*words: str) -> str:
    """What is said of wrong options."""
    done = CliRunner().invoke(main, ["predict", "nowhere", *words])
    assert done.exit_code == 2, done.output
    return done.stderr


ONE_OF = "questions come either from --records, with --image-root for its images, or from --question"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), ONE_OF),
        (("--records", "q.jsonl", "--question", "q"), ONE_OF),
        (("--images", "*.jpg", "--image", "a.jpg", "--question", "q"), ONE_OF),
        (("--image", "a.jpg"), ONE_OF),
        (("--question", "q", "--image-root", "x"), ONE_OF),
        (("--images", "*.nothing", "--question", "q"), "matches no file"),
        (("--question", ""), "question 1 of 1 is empty"),
        (("--question", "q", "-o", "out.txt"), "the suffix decides"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(*words)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in refusal(*words)
