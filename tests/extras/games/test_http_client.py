"""Environments behind HTTP: a real server on the loopback interface, and a server with all faults of a network."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from roll_opd.extras.games import ENVIRONMENTS, Environment, EnvironmentFailure, make
from roll_opd.extras.games import http_client as remote_module
from roll_opd.extras.games.serve import EnvironmentServer, main

ROOT = Path(__file__).parents[3]


@ENVIRONMENTS.register("counter_of_test_remote")
class Counter(Environment):
    """Counts its steps, and does as configured."""

    def __init__(self, word: str = "step") -> None:
        self.word, self.count, self.seed = word, 0, None

    def reset(self, seed: int | None = None) -> Any:
        if seed == 13:
            raise RuntimeError("an unlucky seed")
        self.count, self.seed = 0, seed  # type: ignore[assignment]
        return f"seed {seed}", {"env_instruction": "Count.", "array": np.arange(2), "odd": {1}}

    def step(self, action: str) -> Any:
        self.count += 1
        if action == "raise":
            raise KeyError("lost")
        if action == "wrong":
            return "four", "values", "are", "few"
        if action == "slow":
            time.sleep(0.6)
        if action == "object":
            return "", 0, False, False, {"object": object()}
        return f"{self.word} {self.count}", np.float32(0.5), np.bool_(self.count >= 5), False, {"said": action}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(remote_module, "FIRST_WAIT", 0.02)


@pytest.fixture
def served() -> Iterator[Callable[..., EnvironmentServer]]:
    servers: list[EnvironmentServer] = []

    def start(env_type: str = "counter_of_test_remote", episodes: int = 100, **config: Any) -> EnvironmentServer:
        server = EnvironmentServer(env_type, config, "127.0.0.1", 0, episodes)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_served_game_is_the_game(served: Callable[..., EnvironmentServer]) -> None:
    config = {"dim_room": [6, 6], "num_boxes": 1, "max_steps": 50}
    near, far = make("sokoban", **config), make("http", url=served("sokoban", **config).url)
    for seed in range(20):
        assert far.reset(seed=seed) == near.reset(seed=seed)
        for action in near.solve():
            assert far.step(f"<answer>{action}</answer>") == near.step(f"<answer>{action}</answer>")
    far.close()


def test_values_are_plain_and_texts_arrive_whole(served: Callable[..., EnvironmentServer]) -> None:
    env = make("http", url=served(word="ein Schritt √").url + "/")
    assert env.reset(seed=3) == ("seed 3", {"env_instruction": "Count.", "array": [0, 1], "odd": [1]})
    text = "\ud800\x00 √ " + "x" * 10**6
    assert env.step(text) == ("ein Schritt √ 1", 0.5, False, False, {"said": text})
    assert env.reset() == ("seed None", env.reset()[1])


def test_many_episodes_at_once_do_not_mix(served: Callable[..., EnvironmentServer]) -> None:
    url = served().url

    def play(seed: int) -> bool:
        env = make("http", url=url)
        first = env.reset(seed=seed)[0] == f"seed {seed}"
        steps = [env.step(str(seed)) for _ in range(5)]
        env.close()
        return first and [step[0] for step in steps] == [f"step {n}" for n in range(1, 6)] and steps[-1][2]

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(play, range(14, 64)))


def test_environments_are_used_again_and_the_oldest_ends(served: Callable[..., EnvironmentServer]) -> None:
    server = served(episodes=2)
    one, two, three = (make("http", url=server.url, retries=0) for _ in range(3))
    for env in (one, two):
        env.reset(seed=1)
    one.step("x")
    three.reset(seed=1)  # `two` has waited longest
    assert one.step("x")[0] == "step 2"
    with pytest.raises(EnvironmentFailure, match=r"/step: HTTP 404: episode .* is not active"):
        two.step("x")
    assert two.reset(seed=2)[0] == "seed 2"
    for env in (one, two, three):
        env.close()
    assert len(server.episodes._free) == 2 and not server.episodes._episodes


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("raise", "HTTP 422: counter_of_test_remote: KeyError: 'lost'"),
        ("wrong", "step returned tuple of 4; return"),
        ("object", "info is not JSON: a object; return plain values"),
    ],
)
def test_an_error_of_an_environment_is_reported_to_its_client(
    served: Callable[..., EnvironmentServer], action: str, said: str
) -> None:
    env = make("http", url=served().url)
    env.reset(seed=1)
    with pytest.raises(EnvironmentFailure, match=said):
        env.step(action)
    assert env.reset(seed=2)[0] == "seed 2"
    with pytest.raises(EnvironmentFailure, match="RuntimeError: an unlucky seed"):
        env.reset(seed=13)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/nothing", {"episode": "a"}, 404, "the known paths are /reset, /step and /close"),
        ("/reset", {}, 400, "episode must be a non-empty string"),
        ("/reset", {"episode": "a", "seed": "1"}, 400, "seed must be an integer"),
        ("/step", {"episode": "a", "action": 1}, 400, "action must be a string"),
        ("/step", {"episode": "a", "action": "x"}, 404, "episode a is not active"),
        ("/reset", [1], 400, "not a JSON object"),
        ("/reset", None, 400, "not JSON"),
    ],
)
def test_requests_that_make_no_sense(
    served: Callable[..., EnvironmentServer], path: str, body: Any, status: int, said: str
) -> None:
    answer = httpx.post(served().url + path, content=b"{" if body is None else json.dumps(body).encode())
    assert answer.status_code == status and said in answer.json()["error"]


def test_a_repeated_request_is_played_once(served: Callable[..., EnvironmentServer]) -> None:
    url = served().url
    post = lambda path, **body: httpx.post(f"{url}/{path}", json={"episode": "e", **body})  # noqa: E731
    assert post("reset", seed=1).json() == post("reset", seed=1).json()
    assert [post("step", step=number, action="x").json()["observation"] for number in (1, 1, 2, 2)] == [
        *("step 1", "step 1"),
        *("step 2", "step 2"),
    ]
    assert post("step", action="x").json()["observation"] == "step 3"  # without a number it is the next
    assert [post("step", step=number, action="x").status_code for number in (1, 2, 5)] == [409] * 3
    assert post("reset", seed=1).status_code == 409  # it has been played on
    assert [post("close").status_code, post("close").status_code, post("step", action="x").status_code] == [
        *(200, 200),
        404,
    ]


# --- a network that goes wrong


class Bad(ThreadingHTTPServer):
    """Stands before an environment's server; what `faults` names happens to the first requests that are no /close.

    `500`, `503`, `text`: the answer; `late`: it is passed on, and the answer comes too late; `lost`: it is passed on,
    and the connection is reset; `unheard`: the connection is reset at once.
    """

    daemon_threads = True

    def __init__(self, behind: str, repeats: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _BadHandler)
        self.behind, self.repeats, self.faults, self.log = behind, repeats, [], []  # type: ignore[var-annotated]
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class _BadHandler(BaseHTTPRequestHandler):
    server: Bad

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/close":
            return self._reply(200, b"{}")
        fault = self.server.faults.pop(0) if self.server.faults else ""
        self.server.log.append((self.path, fault))
        if fault == "unheard":
            return self._reset()
        if fault.isdigit():
            return self._reply(int(fault), b'{"error": "a bad day"}')
        if fault == "text":
            return self._reply(200, b"<html>welcome</html>")
        answer = httpx.post(self.server.behind + self.path, content=body)
        if fault == "lost":
            return self._reset()
        if fault == "late":
            time.sleep(0.7)
        found = answer.json()
        if not self.server.repeats:
            found.pop("repeats", None)
        return self._reply(answer.status_code, json.dumps(found).encode())

    def _reply(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass  # it was late

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was closed on purpose
            super().finish()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def bad(served: Callable[..., EnvironmentServer]) -> Iterator[Callable[..., Bad]]:
    started: list[Bad] = []

    def start(repeats: bool = True) -> Bad:
        started.append(Bad(served().url, repeats))
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


SLOW = ("late", "unheard")  # only the time limit ends them, and a busy machine may need another try


@pytest.mark.parametrize("fault", ["500", "503", "429", "late", "lost", "unheard"])
def test_a_fault_on_the_way_does_no_harm(bad: Callable[..., Bad], fault: str) -> None:
    server = bad()
    slow = fault in SLOW
    env = make("http", url=server.url, timeout=0.5 if slow else 30)
    server.faults = [fault, fault]
    assert env.reset(seed=1)[0] == "seed 1"
    server.faults = [fault]
    assert env.step("x")[0] == "step 1"  # played once, although it was sent twice
    assert env.step("x")[0] == "step 2"
    paths = [path for path, _ in server.log]
    assert paths == sorted(paths) and (paths == ["/reset"] * 3 + ["/step"] * 3 or (slow and len(paths) > 6))


@pytest.mark.parametrize("fault", ["500", "late", "lost", "unheard"])
def test_a_step_is_not_repeated_for_a_server_that_would_play_it_twice(bad: Callable[..., Bad], fault: str) -> None:
    server = bad(repeats=False)
    env = make("http", url=server.url, timeout=0.5 if fault in SLOW else 30)
    server.faults = [fault]
    assert env.reset(seed=1)[0] == "seed 1"
    server.faults = [fault]
    with pytest.raises(EnvironmentFailure, match=f"^{server.url}/step: "):
        env.step("x")
    assert [entry for entry in server.log if entry[0] == "/step"] == [("/step", fault)]


@pytest.mark.parametrize(
    ("fault", "said", "tries"),
    [
        ("500", "HTTP 500: a bad day", 3),
        ("late", "ReadTimeout", 3),
        ("400", "HTTP 400: a bad day", 1),
        ("text", "is not a JSON object: welcome", 1),
    ],
)
def test_what_does_not_pass_ends_with_the_address(bad: Callable[..., Bad], fault: str, said: str, tries: int) -> None:
    server = bad()
    server.faults = [fault] * 9
    with pytest.raises(EnvironmentFailure, match=f"^{server.url}/reset: .*{said}"):
        make("http", url=server.url, timeout=0.3 if fault == "late" else 30, retries=2).reset(seed=1)
    assert len(server.log) == tries


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EnvironmentFailure, match=f"{url}/reset: ConnectError.*start a server with"):
            make("http", url=url, retries=1).reset()
        with pytest.raises(EnvironmentFailure, match="call reset"):
            make("http", url=url).step("x")


# --- the command


def test_the_command_serves_on_loopback_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "roll_opd.extras.games.serve", "frozen_lake", "size=5", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        line = server.stdout.readline()
        assert line.startswith("serving frozen_lake at http://127.0.0.1:")
        env = make("http", url=line.split()[-1])
        assert env.reset(seed=1) == make("frozen_lake", size=5).reset(seed=1)
        env.close()
        server.send_signal(2)
        assert server.wait(20) == 0
        assert server.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frozen_lake", "sise=5"], "did you mean 'size'"),
        (["frozen_lake", "size"], "write key=value"),
        (["frozen_lake", "size=[5"], "is not YAML"),
        (["nothing"], "unknown environment"),
        (["frozen_lake", "--port", "70000"], "--port is 70000"),
        (["frozen_lake", "--episodes", "0"], "--episodes is 0"),
    ],
)
def test_what_cannot_be_served_ends_before_it_listens(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["frozen_lake", "--port", str(taken.getsockname()[1])]) == 1
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err
