"""A dataset on the Hub is downloaded at a commit, and its licence reported; huggingface_hub talks to a local server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lookonce.datasets.prepare.definition import HubSection, find_definition
from lookonce.datasets.prepare.run import Options, prepare
from lookonce.datasets.prepare.sources import download_source
from lookonce.errors import SourceError, UsageError

NAME = "SimulaMet-HOST/Kvasir-VQA"
FIRST, SECOND = "1" * 39 + "a", "2" * 39 + "b"
KVASIR = find_definition("kvasir-vqa")
ROW = {"image_id": "a", "question": "Is there text?", "answer": "yes"}
FILES = {
    "README.md": b"---\nlicense: cc-by-nc-4.0\n---\nabout it",
    "data/raw.jsonl": json.dumps(ROW).encode() + b"\n",
    "images/a.jpg": b"\xff\xd8\xffpixels",
    "notes.bin": b"not wanted",
}


@pytest.fixture
def local(make_hub: Callable[..., Any]) -> Any:
    return make_hub(NAME, "datasets", FILES, ["license:cc-by-nc-4.0"])


@pytest.fixture
def section() -> HubSection:
    return HubSection(id=NAME, files=["data/*", "images/*"])


def test_matching_files_are_downloaded_at_the_commit_of_main(local, section, capfd):
    source = download_source(section, KVASIR)
    assert (source.location, source.revision, source.licence) == (NAME, SECOND, "cc-by-nc-4.0")
    assert [*source.files] == ["data/raw.jsonl"] and source.format == "json"
    assert (source.root / "images" / "a.jpg").read_bytes() == FILES["images/a.jpg"]
    assert not (source.root / "notes.bin").exists() and capfd.readouterr() == ("", "")
    assert all(f"/resolve/{SECOND}/" in path for path in local.asked if "resolve" in path)


@pytest.mark.parametrize("where", ["command line", "definition"])
def test_a_revision_pins_the_commit(local, section, where):
    pinned = section.model_copy(update={"revision": FIRST if where == "definition" else None})
    source = download_source(pinned, KVASIR, FIRST if where == "command line" else None)
    assert source.revision == FIRST
    assert all(f"/resolve/{FIRST}/" in path for path in local.asked if "resolve" in path)


def test_a_downloaded_commit_needs_no_hub(local, section):
    download_source(section, KVASIR, FIRST)
    local.refuses = (503, "")
    again = download_source(section, KVASIR, FIRST)
    assert [*again.files] == ["data/raw.jsonl"] and again.revision == FIRST
    with pytest.raises(SourceError, match=r"cannot download .*/Kvasir-VQA from the Hub: .*(?s:.)*--source DIR"):
        download_source(section, KVASIR)


def test_an_unknown_dataset_is_refused_with_its_name(local):
    with pytest.raises(SourceError, match="cannot download no/such at revision main from the Hub"):
        download_source(HubSection(id="no/such"), KVASIR, "main")


def test_prepare_reports_the_commit_and_the_licence(local, tmp_path):
    notes: list[str] = []
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"name: mine\nlicence: CC BY-NC 4.0\nhub: {{id: {NAME}, files: [data/*, images/*]}}")
    report = prepare(str(mine), tmp_path / "out", Options(), notes.append).report
    assert (
        f"{NAME} at commit {SECOND}, licence on the Hub: cc-by-nc-4.0; to get the same again: --revision {SECOND}"
        in notes
    )
    assert "CC BY-NC 4.0" in notes[0]
    assert (report["source"]["revision"], report["source"]["licence"]) == (SECOND, "cc-by-nc-4.0")


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--revision is for a dataset on the Hub"):
        prepare("kvasir-vqa", tmp_path / "out", Options(source=str(tmp_path), revision=FIRST))
