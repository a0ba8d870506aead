"""Guard of the project's words: plain technical English, one meaning a word."""

from __future__ import annotations

import functools
import re
import subprocess

import pytest

AVOID = {
    r"can not": "cannot",
    r"anew": "again",
    r"to be had": "available",
    r"in work": "current, in progress",
    r"dealt|deal(s|ing)? (to|out)": "assigned, distributed, stratified",
    r"(go|goes|going|gone|went) on (from|with|after|where|there|afterwards)": "resume, continue",
    r"(is|are|was|were|be) told|(and|but|not) told": "reported, printed",
    r"who (only|looks?|asks?|begins?|wants?|gives?|takes?|has|comes|reads|writes|dies|gets)": (
        "a process that, a user who"
    ),
    r"nobody|somebody": "no token, no process, no user",
    r"is no (folder|file|run|cache|model|shard|name|number|image|list|mapping|record|package)\b": "is not a",
    r"for ever": "always, permanently",
    r"so many": "this many, at most N",
    r"(its|their) own affair": "name who decides",
    r"the plain way|plain ways?": "stock training",
    r"wears?|wearing": "a model with an adapter",
    r"in silence": "silently",
    r"gives? back": "returns",
    r"says? (nothing|so)\b": "does not report, reports it",
    r"far more than": "say how much",
    r"forwards": "forward passes, tower batches",
    r"of old": "from before",
    r"as they lie": "unchanged",
    r"(?<![-.`\"'])arms?(?![`\"':])": "variant, experiment",
    r"(?<![`\"'])lessons?(?![`\"':])": "stage",
    r"waves?": "batch",
    r"cannot be asked": "cannot be reached",
    r"where there is internet": "with internet access",
}
"""What to avoid, as regular expressions, and what to write instead."""
DOCSTRING_STARTS = r'"""(Of|That|Since|Before|Beside|From which|Below which|By which) '
"""A field's docstring is a sentence by itself, and does not go on from the field's name."""
NOT_OURS = ("LICENSE", "tests/unit/test_language.py", "constraints.txt")


@functools.cache
def texts(root):
    """Every tracked text file of the project by its name."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    suffixes = (".py", ".md", ".sh", ".sbatch", ".yaml", ".toml", ".example", "Makefile")
    names = [name for name in listed.stdout.splitlines() if name.endswith(suffixes) and not name.startswith(NOT_OURS)]
    return {name: (root / name).read_text() for name in names if (root / name).is_file()}


def places(found, pattern):
    return [
        (f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}", match)
        for name, text in found.items()
        for match in re.finditer(pattern, text)
    ]


def test_words_to_avoid(root):
    """One search for all of them in lower case, which takes a twentieth of the time of a search for each."""
    groups = (rf"(?P<_{number}>{words.replace(' ', chr(92) + 's+')})" for number, words in enumerate(AVOID))
    lower = {name: text.lower() for name, text in texts(root).items()}
    better = list(AVOID.values())
    found = places(lower, rf"\b(?:{'|'.join(groups)})\b")
    assert [f"{place}: write instead: {better[int(match.lastgroup[1:])]}" for place, match in found] == []


def test_docstrings_of_fields_are_sentences_by_themselves(root):
    code = {name: text for name, text in texts(root).items() if name.endswith(".py")}
    assert [place for place, _ in places(code, DOCSTRING_STARTS)] == []
