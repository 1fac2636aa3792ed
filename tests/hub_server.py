"""A small server that speaks the protocol of the Hugging Face Hub, with faults, for the unmodified huggingface_hub.

`serve(folder)` publishes each directory `folder/models/<owner>/<name>` and `folder/datasets/<owner>/<name>` as a
repository with one commit, whose id depends on the content.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PRIVATE, GATED = "private", "gated"  # owners whose repositories need a token
TOKEN, OUTSIDER = "hf_member", "hf_outsider"  # tokens with and without access
BROKEN = "broken"  # owner whose weights break off once, after half of their bytes
DEAD = "dead"  # owner whose weights break off every time
SLOW = "slow"  # owner whose weights arrive a byte a second
DOWN = "down"  # owner whose repositories answer 503


class HubServer(ThreadingHTTPServer):
    """The server. `requests` has (method, path) of every request, `sent` the number of bytes of each file."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: list[tuple[str, str]] = []
        self.sent: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, kind: str, name: str) -> dict[str, Path]:
        root = self.folder / kind / name
        return {file.relative_to(root).as_posix(): file for file in sorted(root.rglob("*")) if file.is_file()}

    def commit(self, kind: str, name: str) -> str:
        found = hashlib.sha1(name.encode())
        for path, file in self.files(kind, name).items():
            found.update(path.encode() + file.read_bytes())
        return found.hexdigest()

    def fetched(self, name: str) -> list[str]:
        """Names of the files of a repository that were sent."""
        return sorted(path.partition(f"{name}/")[2] for path in self.sent if f"/{name}/" in f"/{path}")


@contextmanager
def serve(folder: Path) -> Iterator[HubServer]:
    server = HubServer(folder)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        is_api, parts = parts[0] == "api", parts[1:] if parts[0] == "api" else parts
        kind = "datasets" if parts[0] == "datasets" else "models"
        parts = parts[1:] if parts[0] in ("datasets", "models") else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        if refused := self._refusal(kind, name, is_file=not is_api):
            return self._error(*refused)
        commit = self.server.commit(kind, name)
        if rest and rest[0] in ("revision", "tree", "resolve"):
            revision = rest[1]
            if revision not in ("main", "v1", commit):
                return self._error(404, "RevisionNotFound")
        if not is_api and rest[:1] == ["resolve"]:
            return self._file(kind, name, commit, "/".join(rest[2:]))
        files = self.server.files(kind, name)
        if rest[:1] == ["tree"]:
            listed = [
                {"type": "file", "path": file, "size": place.stat().st_size, "oid": _etag(place)}
                for file, place in files.items()
            ]
            return self._json(listed)
        siblings = [{"rfilename": file, "size": place.stat().st_size} for file, place in files.items()]
        self._json({"id": name, "sha": commit, "siblings": siblings, "private": False, "gated": False, "tags": []})

    def _refusal(self, kind: str, name: str, *, is_file: bool) -> tuple[int, str] | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        owner = name.partition("/")[0]
        if token not in ("", TOKEN, OUTSIDER):
            return 401, "Invalid credentials in Authorization header"
        if owner == DOWN:
            return 503, ""
        if not self.server.files(kind, name) or (owner == PRIVATE and token != TOKEN):
            return (404 if token else 401), "RepoNotFound"
        if owner == GATED and is_file and token != TOKEN:
            return (403 if token else 401), "GatedRepo"
        return None

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Message" if " " in code else "X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _file(self, kind: str, name: str, commit: str, path: str) -> None:
        place = self.server.files(kind, name).get(path)
        if place is None:
            return self._error(404, "EntryNotFound")
        content = place.read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-").partition("=")[2].partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_etag(place)}"')
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        owner = name.partition("/")[0]
        is_new = f"{name}/{path}" not in self.server.sent
        is_cut = path.endswith(".safetensors") and (owner == DEAD or (owner == BROKEN and is_new))
        body = content[start : start + (len(content) - start) // 2] if is_cut else content[start:]
        if owner == SLOW and path.endswith(".safetensors"):
            self.server.sent[f"{name}/{path}"] = 0
            for byte in body:
                with suppress(OSError):  # the client has ended
                    self.wfile.write(bytes([byte]))
                    time.sleep(1)
                    continue
                return
        self.wfile.write(body)
        self.server.sent[f"{name}/{path}"] = self.server.sent.get(f"{name}/{path}", 0) + len(body)
        self.close_connection = self.close_connection or is_cut


def _etag(place: Path) -> str:
    return hashlib.sha1(place.read_bytes()).hexdigest()
