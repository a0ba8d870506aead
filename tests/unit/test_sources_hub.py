"""A set on the Hub is downloaded at a commit, and its licence shown: huggingface_hub itself, and a Hub of our own."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from lookonce.datasets.prepare import hub
from lookonce.datasets.prepare.definition import HubSection, find_definition
from lookonce.datasets.prepare.run import Options, prepare
from lookonce.errors import SourceError, UsageError

NAME = "SimulaMet-HOST/Kvasir-VQA"
FIRST, SECOND = "1" * 40, "2" * 40
KVASIR = find_definition("kvasir-vqa")
ROW = {"image_id": "a", "question": "Is there text?", "answer": "yes"}
FILES = {
    "README.md": b"about it",
    "data/raw.jsonl": json.dumps(ROW).encode() + b"\n",
    "images/a.jpg": b"\xff\xd8\xffpixels",
    "notes.bin": b"not wanted",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as a download needs; `main` is the second commit."""

    asked: list[str] = []
    is_down = False

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        commit = FIRST if FIRST in path else SECOND
        name = path.partition(f"/resolve/{commit}/")[2]
        if self.is_down or (not name and not path.startswith(f"/api/datasets/{NAME}")):
            self.reply(404 if not self.is_down else 503, b"{}")
        elif name:
            self.reply(200, FILES[name], with_body, {"X-Repo-Commit": commit})
        elif "/tree/" in path:
            tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
            self.reply(200, json.dumps(tree).encode())
        else:
            files = [{"rfilename": name} for name in FILES]
            info = {"id": NAME, "sha": commit, "siblings": files, "tags": ["license:cc-by-nc-4.0"]}
            self.reply(200, json.dumps(info).encode())

    def reply(self, status: int, body: bytes, with_body: bool = True, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        etag = hashlib.sha256(body).hexdigest()
        for key, value in ({"Content-Length": str(len(body)), "ETag": f'"{etag}"'} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setattr(Hub, "is_down", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def section() -> HubSection:
    return HubSection(id=NAME, files=["data/*", "images/*"])


def test_what_is_wanted_is_downloaded_at_the_commit_that_main_is(endpoint, section, capfd):
    source = hub.download(section, KVASIR, endpoint=endpoint)
    assert (source.place, source.revision, source.licence) == (NAME, SECOND, "cc-by-nc-4.0")
    assert source.files == ("data/raw.jsonl",) and source.form == "json"
    assert (source.root / "images" / "a.jpg").read_bytes() == FILES["images/a.jpg"]
    assert not (source.root / "notes.bin").exists() and capfd.readouterr() == ("", "")
    assert all(f"/resolve/{SECOND}/" in path for path in Hub.asked if "resolve" in path)


@pytest.mark.parametrize("where", ["command line", "definition"])
def test_a_revision_pins_the_commit(endpoint, section, where):
    pinned = section.model_copy(update={"revision": FIRST if where == "definition" else None})
    source = hub.download(pinned, KVASIR, FIRST if where == "command line" else None, endpoint=endpoint)
    assert source.revision == FIRST
    assert all(f"/resolve/{FIRST}/" in path for path in Hub.asked if "resolve" in path)


def test_a_pinned_commit_that_was_downloaded_needs_no_hub(endpoint, section, monkeypatch):
    hub.download(section, KVASIR, FIRST, endpoint=endpoint)
    monkeypatch.setattr(Hub, "is_down", True)
    again = hub.download(section, KVASIR, FIRST, endpoint=endpoint)
    assert again.files == ("data/raw.jsonl",) and again.revision == FIRST
    with pytest.raises(SourceError, match=r"can not download .*/Kvasir-VQA from the Hub: .*(?s:.)*--source DIR"):
        hub.download(section, KVASIR, endpoint=endpoint)


def test_a_set_that_is_not_there_is_named(endpoint):
    with pytest.raises(SourceError, match="can not download no/such at revision main from the Hub"):
        hub.download(HubSection(id="no/such"), KVASIR, "main", endpoint=endpoint)


def test_prepare_tells_the_commit_and_the_licence_and_the_report_names_them(endpoint, monkeypatch, tmp_path):
    real = hub.download
    monkeypatch.setattr(
        "lookonce.datasets.prepare.run.download", lambda *arguments: real(*arguments, endpoint=endpoint)
    )
    notes: list[str] = []
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"name: mine\nlicence: CC BY-NC 4.0\nhub: {{id: {NAME}, files: [data/*, images/*]}}")
    report = prepare(str(mine), tmp_path / "out", Options(), notes.append).report
    assert f"{NAME} at commit {SECOND}, licence there: cc-by-nc-4.0; the same again: --revision {SECOND}" in notes
    assert "CC BY-NC 4.0" in notes[0]
    assert (report["source"]["revision"], report["source"]["licence"]) == (SECOND, "cc-by-nc-4.0")


def test_by_default_the_definitions_set_is_downloaded(monkeypatch, tmp_path):
    asked = []

    def repo_info(self, name, **options):
        asked.append((name, options.get("revision")))
        return SimpleNamespace(sha=SECOND, card_data=None, tags=["license:mit"])

    def snapshot(name, **options):
        asked.append((name, options["revision"], options["allow_patterns"]))
        raise ConnectionError("no network here")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", repo_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(SourceError, match="no network here"):
        prepare("kvasir-vqa", tmp_path / "out")
    assert asked == [(NAME, None), (NAME, SECOND, ["*.parquet", "README.md", "LICENSE*"])]
    assert not (tmp_path / "out").exists()


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--revision is of a set on the Hub"):
        prepare("kvasir-vqa", tmp_path / "out", Options(source=str(tmp_path), revision=FIRST))
