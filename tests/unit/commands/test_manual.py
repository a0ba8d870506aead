"""The page of each command: every command has one, every page and heading exists, and help ends with its address."""

from __future__ import annotations

import re
import tomllib

import pytest
from click.testing import CliRunner
from support.commands import all_commands

from lookonce.cli import main
from lookonce.commands import manual


def commands() -> list[tuple[str, ...]]:
    return [words for words, _ in all_commands()]


def headings(text: str) -> set[str]:
    lines = re.findall(r"^#+ +(.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_help_page_ends_with_an_address_that_exists(root, words):
    last = CliRunner().invoke(main, [*words, "-h"]).stdout.splitlines()[-1]
    found = re.fullmatch(r"  Documentation: (.*?)(?:#(.+))?", last)
    assert found, last
    page = root / found[1].removeprefix(f"{manual.SHARED}/")
    assert page.is_file() and (found[2] is None or found[2] in headings(page.read_text())), last


def test_no_page_is_listed_for_a_command_that_does_not_exist():
    assert {name for name in manual.PAGES} <= {" ".join(words) for words in commands()}


def test_every_command_and_group_is_listed_itself():
    assert {" ".join(words) for words in commands() if len(words) < 2} <= manual.PAGES.keys()
    with pytest.raises(KeyError):
        manual.page_of(("new",))
    assert manual.page_of(("data", "convert")) == manual.PAGES["data"]


def test_an_address_is_on_the_site_or_where_a_wheel_put_it_or_in_the_repository(tmp_path):
    page = "docs/training.md#memory"
    assert manual.address(page, "https://example.org", tmp_path) == "https://example.org/docs/training.html#memory"
    assert manual.address(page, "", tmp_path) == f"{tmp_path}/{page}"
    assert manual.address(page, "", tmp_path / "absent") == page


def test_the_site_is_that_of_the_metadata(root):
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls", {})
    assert urls.get("Documentation", "").rstrip("/") == manual.SITE
