"""Errors of real clients at a closed port and at a server that answers with a status."""

import asyncio
import json
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import requests

from roll_opd.base.failures import of_a_service


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(int(self.path.split("/")[1]))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def raised(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception as error:
        try:
            raise RuntimeError("no score") from error
        except RuntimeError as wrapped:
            assert of_a_service(wrapped) == of_a_service(error)
        return of_a_service(error)
    raise AssertionError


def get_by_openai(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0).models.list()


CLIENTS: tuple[Callable[[str], Any], ...] = (
    lambda url: urllib.request.urlopen(url, timeout=5),
    lambda url: httpx.get(url).raise_for_status(),
    lambda url: requests.get(url, timeout=5).raise_for_status(),
    get_by_openai,
)


def test_a_service_that_is_down_or_overloaded_is_found_with_each_client(address: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for client in CLIENTS:
            assert raised(lambda client=client: client(f"http://127.0.0.1:{closed.getsockname()[1]}"))
            for status, passes in ((429, True), (500, True), (503, True), (400, False), (404, False), (501, False)):
                assert raised(lambda client=client, s=status: client(f"{address}/{s}")) == passes


def test_errors_of_inputs_and_files_are_not_of_a_service() -> None:
    for call in (
        lambda: json.loads("<html>"),
        lambda: Path("/no/such/file").read_text(),
        lambda: {}["key"],
        lambda: 1 / 0,
    ):
        assert not raised(call)
    assert raised(lambda: asyncio.run(asyncio.wait_for(asyncio.Event().wait(), 0)))
