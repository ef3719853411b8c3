"""A local stand-in for the API of the Hugging Face Hub, as far as its client needs it: downloads, and commits with LFS."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The state of the stand-in: ``files`` of repositories by "models/ORG/NAME", and the received requests."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)  # repositories whose commit is not COMMIT
    private: dict[str, bool] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def commit_of(self, repo: str) -> str:
        return self.commits.get(repo, COMMIT)


@contextmanager
def stand_in() -> Iterator[Hub]:
    """Start a hub on the loopback."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._note()
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("api/") and ("/revision/" in path or path.count("/") == 3):
            kind, org, name = path.split("/")[1:4]
            repo = f"{kind}/{org}/{name}"
            if repo not in self.hub.files:
                return self._missing("RepoNotFound")
            siblings = [{"rfilename": file} for file in self.hub.files[repo]]
            return self._json(
                {"id": f"{org}/{name}", "sha": self.hub.commit_of(repo), "siblings": siblings, "private": False}
            )
        if path.startswith("api/") and "/tree/" in path:
            kind, org, name = path.split("/")[1:4]
            files = self.hub.files.get(f"{kind}/{org}/{name}", {})
            return self._json(
                [{"type": "file", "path": name, "size": len(data), "oid": _oid(data)} for name, data in files.items()]
            )
        if "/resolve/" in path:
            before, _, after = path.partition("/resolve/")
            repo = before if before.startswith("datasets/") else f"models/{before}"
            file = after.partition("/")[2]
            if (data := self.hub.files.get(repo, {}).get(file)) is None:
                return self._missing("EntryNotFound")
            return self._answer(200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": self.hub.commit_of(repo)})
        return self._missing("RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._note()
        path, body = unquote(urlsplit(self.path).path).strip("/"), self._body()
        if path == "api/repos/create":
            asked = json.loads(body)
            repo = f"models/{asked['organization']}/{asked['name']}"
            self.hub.private[repo] = asked.get("visibility") == "private" or asked.get("private", False)
            self.hub.files.setdefault(repo, {})
            return self._json({"url": f"{self.hub.url}/{repo.removeprefix('models/')}"})
        if path == "api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if "/preupload/" in path:
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            return self._json({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            kind, org, name = path.split("/")[1:4]
            self._commit(f"{kind}/{org}/{name}", body)
            return self._json(
                {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.hub.url}/{org}/{name}/commit/{COMMIT}"}
            )
        return self._missing("RepoNotFound")

    def do_PUT(self) -> None:
        self._note()
        self.hub.lfs[self.path.rpartition("/")[2]] = self._body()
        self._json({})

    def _commit(self, repo: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.hub.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.hub.lfs[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"]
                self.hub.files[repo][value["path"]] = data

    def _note(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        if token := self.headers.get("Authorization"):
            self.hub.tokens.add(token)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().strip(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str) -> None:
        self._answer(404, b'{"error": "not here"}', {"X-Error-Code": code, "Content-Type": "application/json"})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _oid(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
