"""The page of the documentation for each command, whose address ends the command's help.

Design: one table, so that a page is renamed in one place; a test compares it with the commands and with the headings of
the pages. While the project has no site, an address is the path of a file: in the repository, or where a wheel put it.
With a site, `SITE` is its address and `Documentation` in pyproject.toml's urls.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

SITE = ""
"""The address of the site, without a slash at its end; empty while there is none."""
SHARED = Path(sys.prefix, "share", "lookonce")
"""The folder in which a wheel puts pages, run files, and the scripts for Slurm."""
PAGES = {
    "": "docs/index.md",
    "adapter": "docs/serving.md",
    "adapter merge": "docs/merge.md",
    "adapter push": "docs/serving.md#upload-to-the-hub",
    "ask": "docs/ask.md#a-conversation",
    "bench": "docs/benchmarks.md",
    "bench step": "docs/benchmarks.md#training",
    "cache": "docs/cache.md",
    "cache build": "docs/cache.md#build-it",
    "cache gc": "docs/cache.md#look-after-it",
    "cache plan": "docs/cache.md#build-it",
    "cache repair": "docs/cache.md#look-after-it",
    "cache show": "docs/cache.md#look-after-it",
    "cache stage": "docs/cache.md#bring-it-nearer",
    "cache verify": "docs/cache.md#look-after-it",
    "check": "docs/getting-started.md#first-run-file",
    "compare": "docs/compare.md",
    "data": "docs/getting-started.md#your-data",
    "data prepare": "datasets/README.md#known-datasets",
    "eval": "docs/evaluation.md",
    "export": "docs/predictions.md#submissions-to-challenges",
    "fetch": "docs/getting-started.md#the-first-adapter",
    "init": "docs/getting-started.md#first-run-file",
    "predict": "docs/ask.md#one-question",
    "report": "docs/run-report.md",
    "sample": "docs/getting-started.md#the-sample",
    "selftest": "docs/selftest.md",
    "status": "docs/cluster.md",
    "study": "docs/studies.md",
    "study jobs": "docs/studies.md#on-a-cluster",
    "study plan": "docs/studies.md#what-it-will-cost",
    "study report": "docs/studies.md#compare-the-arms",
    "study run": "docs/studies.md#run-it",
    "study status": "docs/studies.md#run-it",
    "train": "docs/training.md",
}
"""The page, and perhaps its heading, by the words of a command. One that is not listed has the page of its group."""


def page_of(words: tuple[str, ...]) -> str:
    """The page of a command, as a path in the repository.

    Raises:
        KeyError: neither the command nor its group is listed.
    """
    name = " ".join(words)
    return PAGES[name] if name in PAGES or len(words) < 2 else page_of(words[:-1])


def address(page: str, site: str = SITE, shared: Path = SHARED) -> str:
    """The address of a page: on the site; or if there is none, its path in an installed wheel, or in the repository."""
    if site:
        return f"{site}/{page.replace('.md', '.html')}"
    return str(shared / page) if shared.is_dir() else page


def epilog(words: tuple[str, ...]) -> str:
    """The end of the help of a command: the address of its page."""
    return f"\b\nDocumentation: {address(page_of(words))}"  # \b: an address is not wrapped


def add_addresses(command: click.Command, words: tuple[str, ...]) -> None:
    """Let the help of a command, and of all commands below it, end with the address of its page."""
    command.epilog = epilog(words)
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            add_addresses(child, (*words, name))
