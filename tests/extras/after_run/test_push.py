"""`roll-opd push` with the unmodified client of the hub, against a small server that speaks its protocol."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from after_run_assets import project_with_run
from huggingface_hub import constants

from roll_opd.commands.main import main

TOKEN = "hf_of_this_test"


class Hub(BaseHTTPRequestHandler):
    """A hub with repositories in memory. A token other than `TOKEN` gets 401."""

    repos: ClassVar[dict[str, dict]] = {}

    def _send(self, status: int, value: object, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def _is_refused(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return False
        self._send(401, {"error": "Invalid credentials"})
        return True

    def do_GET(self) -> None:
        if self._is_refused():
            return
        name = "/".join(self.path.split("?")[0].removeprefix("/api/models/").split("/")[:2])
        if name not in self.repos:
            self._send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        repo = self.repos[name]
        files = [{"rfilename": file} for file in repo["files"]]
        self._send(200, {"id": name, "private": repo["private"], "sha": "0" * 40, "siblings": files})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._is_refused():
            return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.repos:
                self._send(409, {"error": "exists", "url": f"http://{self.headers['Host']}/{name}"})
                return
            self.repos[name] = {"private": asked.get("visibility") == "private", "files": {}, "branches": []}
            self._send(200, {"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
            return
        if self.path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
            return
        name = "/".join(self.path.removeprefix("/api/models/").split("/")[:2])
        repo = self.repos[name]
        if "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self._send(200, {"files": [{**file, "shouldIgnore": False} for file in files]})
        elif "/branch/" in self.path:
            repo["branches"].append(self.path.rpartition("/")[2])
            self._send(200, {})
        else:
            assert "/commit/" in self.path, self.path
            repo["revision"] = self.path.rpartition("/")[2]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    repo["files"][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._send(
                200, {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}
            )

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")  # HF_ENDPOINT, if imported
        Thread(target=server.serve_forever, daemon=True).start()
        Hub.repos.clear()
        yield Hub
        server.shutdown()


def test_a_private_repository_gets_the_files_and_the_card(
    hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = project_with_run(tmp_path / "p")
    assert main(["push", str(run.parent), "me/mine"]) == 0
    model = run / "checkpoints/step_3/hf"
    assert hub.repos["me/mine"]["private"] is True and hub.repos["me/mine"]["revision"] == "main"
    assert hub.repos["me/mine"]["files"] == {file.name: file.read_bytes() for file in model.iterdir()}
    assert "README.md" in hub.repos["me/mine"]["files"]
    said = " ".join(capsys.readouterr().out.split())
    assert "(private)" in said and "mine, step 3" in said and "1" * 40 in said

    assert main(["push", str(run), "me/mine", "--revision", "second"]) == 0
    assert (hub.repos["me/mine"]["revision"], hub.repos["me/mine"]["branches"]) == ("second", ["second"])
    assert main(["push", str(run), "me/open", "--public"]) == 0
    assert hub.repos["me/open"]["private"] is False


def test_what_cannot_be_pushed_is_refused_before_a_file_is_sent(
    hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = project_with_run(tmp_path / "p")
    hub.repos["me/open"] = {"private": False, "files": {}}
    card = run / "checkpoints/step_3/hf/README.md"
    for words, said in ((["me/open"], "is public"), (["open"], "owner/name"), (["me/x", "--step", "1"], "after 3")):
        assert main(["push", str(run), *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    card.rename(tmp_path / "card")
    assert main(["push", str(run), "me/x"]) == 2 and "no model card" in capsys.readouterr().err
    (tmp_path / "card").rename(card)
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    assert main(["push", str(run), "me/x"]) == 2 and "hf auth login" in " ".join(capsys.readouterr().err.split())
    assert hub.repos == {"me/open": {"private": False, "files": {}}}


def test_a_hub_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["push", str(project_with_run(tmp_path / "p")), "me/x"]) == 1
    assert "check the network" in " ".join(capsys.readouterr().err.split())
