"""A fake Hub, from which huggingface_hub downloads, and to which it uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Hub:
    """The part of the Hub that downloads of one repository need; it has two commits with the same files."""

    name: str
    kind: str
    """The kind of repository: `models` or `datasets`."""
    files: dict[str, bytes]
    tags: list[str]
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)
    refuses: tuple[int, str] | None = None
    """Status and error code of every answer, if set."""
    first: str = "1" * 39 + "a"
    second: str = "2" * 39 + "b"
    """The commit that `main` names."""
    token: str | None = None
    """The access token that may upload; None if the repository is not made to be written to."""
    is_private: bool = False
    exists: bool = True
    branches: dict[str, str] = field(default_factory=dict)
    """The commits of branches beside `main`."""
    messages: list[str] = field(default_factory=list)
    """Those of all commits that were uploaded."""
    large: dict[str, bytes] = field(default_factory=dict)
    """The contents that were uploaded as large files, by their sha256."""
    num_breaks: int = 0
    """The number of large files whose upload the Hub breaks off."""
    on_the_way: dict[str, bytes] = field(default_factory=dict)
    """The contents of files that are sent instead of those that the Hub has, and states."""

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of the answer to a request to read."""
        self.asked.append(path)
        if not self.exists and not self.refuses:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        commit = self.first if self.first in path else self.second
        api, file = f"/api/{self.kind}/{self.name}", path.partition(f"/{self.name}/resolve/{commit}/")[2]
        if self.refuses:
            return self.refuses[0], b"{}", {"X-Error-Code": self.refuses[1]}
        if file:
            stated = _stated(file, self.files[file])
            etag = stated["lfs"]["oid"] if "lfs" in stated else stated["oid"]
            return 200, self.on_the_way.get(file, self.files[file]), {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if path.startswith(f"{api}/tree/"):
            return 200, json.dumps([_stated(key, data) for key, data in self.files.items()]).encode(), {}
        if path in (api, f"{api}/revision/main", f"{api}/revision/{commit}"):
            files = [{"rfilename": key} for key in self.files]
            info = {"id": self.name, "sha": commit, "siblings": files, "tags": self.tags, "private": self.is_private}
            return 200, json.dumps(info).encode(), {}
        return 404, b"{}", {"X-Error-Code": "RevisionNotFound" if path.startswith(api) else "RepoNotFound"}

    def written(self, path: str, token: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of the answer to a request to write."""
        self.asked.append(path)
        if self.refuses:
            return self.refuses[0], b"{}", {"X-Error-Code": self.refuses[1]}
        if path.startswith("/large/"):
            return self._take_large(path.removeprefix("/large/"), body)
        if token != f"Bearer {self.token}":
            return (403 if token else 401), b"{}", {}
        api = f"/api/{self.kind}/{self.name}"
        value = {} if "/commit/" in path else json.loads(body or b"{}")
        if path == "/api/repos/create":
            return self._create(value)
        if path == "/api/validate-yaml":
            return 200, b"{}", {}
        if path.startswith(f"{api}/branch/"):
            self.branches[path.rpartition("/")[2]] = self.second
            return 200, b"{}", {}
        if path.startswith(f"{api}/preupload/"):
            return _json(files=[_upload_mode(one["path"]) for one in value["files"]])
        if path == f"/{self.name}.git/info/lfs/objects/batch":
            return _json(objects=[self._place_of(one) for one in value["objects"]])
        if path.startswith(f"{api}/commit/"):
            return self._commit(path.rpartition("/")[2], [json.loads(line) for line in body.splitlines()])
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def _create(self, value: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        if f"{value['organization']}/{value['name']}" != self.name:
            return 403, b"{}", {}
        status = 409 if self.exists else 200
        if not self.exists:
            self.exists, self.is_private = True, value["visibility"] == "private"
        return status, json.dumps({"url": f"{self.endpoint}/{self.name}"}).encode(), {}

    def _place_of(self, one: dict[str, Any]) -> dict[str, Any]:
        """Where a large file is to be sent, unless it was before."""
        upload = {"upload": {"href": f"{self.endpoint}/large/{one['oid']}"}}
        return one if one["oid"] in self.large else one | {"actions": upload}

    def _take_large(self, sha256: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if self.num_breaks:
            self.num_breaks -= 1
            return 400, b"{}", {}
        assert hashlib.sha256(body).hexdigest() == sha256
        self.large[sha256] = body
        return 200, b"", {}

    def _commit(self, branch: str, lines: list[dict[str, Any]]) -> tuple[int, bytes, dict[str, str]]:
        """Take the files of a commit, which gets a name that follows from them."""
        for one in lines:
            if one["key"] == "file":
                self.files[one["value"]["path"]] = base64.b64decode(one["value"]["content"])
            elif one["key"] == "lfsFile":
                self.files[one["value"]["path"]] = self.large[one["value"]["oid"]]
        self.messages.append(lines[0]["value"]["summary"])
        commit = hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()
        if branch == "main":
            self.second = commit
        else:
            self.branches[branch] = commit
        return _json(commitUrl=f"{self.endpoint}/{self.name}/commit/{commit}", commitOid=commit)


def _json(**value: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(value).encode(), {}


def _stated(path: str, content: bytes) -> dict[str, Any]:
    """What the Hub states of a file; weights and images are large files."""
    stated = {"type": "file", "path": path, "size": len(content)}
    if path.endswith((".safetensors", ".parquet", ".png")):
        sha256 = hashlib.sha256(content).hexdigest()
        return stated | {"oid": "0" * 40, "lfs": {"oid": sha256, "size": len(content), "pointerSize": 130}}
    return stated | {"oid": hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()}


def _upload_mode(path: str) -> dict[str, Any]:
    return {"path": path, "uploadMode": "lfs" if path.endswith(".safetensors") else "regular", "shouldIgnore": False}


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # a connection that does not fit is tried again after a second


@pytest.fixture
def make_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hub]]:
    """Starts a Hub that huggingface_hub uses instead of the real one; downloads go to the test's folder."""
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def make(*of_hub: Any) -> Hub:
        hub = Hub(*of_hub)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body, headers = hub.answer(self.path.partition("?")[0])
                self._send(status, body, headers)

            def do_POST(self) -> None:
                token = self.headers.get("Authorization", "")
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._send(*hub.written(self.path.partition("?")[0], token, body))

            def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for key, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD, do_PUT = do_GET, do_POST

            def log_message(self, *args: object) -> None:
                pass

        server = Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        changes = {
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
            "HF_ASSETS_CACHE": str(tmp_path / "home" / "assets"),
            "ENDPOINT": hub.endpoint,
            "HF_HUB_DISABLE_XET": True,  # it has a protocol of its own
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        }
        for key, value in changes.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{key}", value)
        return hub

    yield make
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()
