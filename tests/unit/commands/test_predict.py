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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--records", "q.jsonl", "--question", "q"), "--records has all of a question"),
        (("--images", "*.jpg", "--image", "a.jpg", "--question", "q"), "give only one of them"),
        (("--image", "a.jpg"), "no question is given"),
        (("--question", "q", "--image-root", "x"), "--image-root is for --records"),
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
