"""A fake Hub, from which huggingface_hub downloads."""

from __future__ import annotations

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

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of the answer to a request."""
        self.asked.append(path)
        commit = self.first if self.first in path else self.second
        api, file = f"/api/{self.kind}/{self.name}", path.partition(f"/{self.name}/resolve/{commit}/")[2]
        if self.refuses:
            return self.refuses[0], b"{}", {"X-Error-Code": self.refuses[1]}
        if file:
            return 200, self.files[file], {"X-Repo-Commit": commit}
        if path.startswith(f"{api}/tree/"):
            tree = [{"type": "file", "path": key, "size": len(data), "oid": key} for key, data in self.files.items()]
            return 200, json.dumps(tree).encode(), {}
        if path in (api, f"{api}/revision/main", f"{api}/revision/{commit}"):
            files = [{"rfilename": key} for key in self.files]
            info = {"id": self.name, "sha": commit, "siblings": files, "tags": self.tags}
            return 200, json.dumps(info).encode(), {}
        return 404, b"{}", {"X-Error-Code": "RevisionNotFound" if path.startswith(api) else "RepoNotFound"}


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
                self.send_response(status)
                etag = hashlib.sha256(body).hexdigest()
                for key, value in ({"Content-Length": str(len(body)), "ETag": f'"{etag}"'} | headers).items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

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
            "ENDPOINT": hub.endpoint,
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
