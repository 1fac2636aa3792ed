"""Servers at the start of a run, on real sockets: one that is down is named in time, one that is up never is."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from roll_opd.base.failures import RunError
from roll_opd.base.frozen import FrozenDict
from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.config.plan import RewardPlan, RewardTerm
from roll_opd.pipelines import server_reach
from roll_opd.pipelines.server_reach import check_reach, servers_of, unreachable
from roll_opd.planner.load_plan import load_plan

Answer = Callable[[socket.socket], None]


def silent(connection: socket.socket) -> None:
    """A server that is busy for longer than the check waits."""
    time.sleep(1.0)


@contextmanager
def listening(answer: Answer, backlog: int = 8) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server, ExitStack() as open_ones:

        def work() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                answer(open_ones.enter_context(connection))
                connection.close()

        threading.Thread(target=work, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def refused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_answers_or_is_busy_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_reach, "CONNECT_SECONDS", 0.3)
    loading = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
    for answer in (lambda connection: connection.sendall(loading), silent):
        with listening(answer) as url:
            assert unreachable(f"{url}/v1", 0) is None


def test_a_server_that_is_down_is_reported_in_time(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    monkeypatch.setattr(server_reach, "CONNECT_SECONDS", 0.3)
    for url, part in ((refused, "refused"), ("http://no-such-host.invalid:8000", "no-such-host.invalid")):
        began = time.monotonic()
        assert part in (unreachable(url, 0.7) or "")
        assert time.monotonic() - began < 3
    with listening(lambda connection: None) as url:  # such as a tunnel to a port without a server
        assert unreachable(url, 0) == server_reach.CLOSED
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as others:  # packets are dropped
        place = full.getsockname()
        for _ in range(2):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(place)
        assert "no connection in" in (unreachable(f"http://127.0.0.1:{place[1]}", 0) or "")


def test_a_run_waits_for_a_server_that_is_being_started(refused: str) -> None:
    port = int(refused.rpartition(":")[2])

    def start() -> None:
        time.sleep(0.8)
        with socket.create_server(("127.0.0.1", port)) as server:
            server.accept()[0].sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    threading.Thread(target=start, daemon=True).start()
    assert unreachable(refused, 5) is None


@pytest.mark.extras
def test_every_kind_of_server_is_named_with_its_key(refused: str) -> None:
    overrides = [f"teacher.http.url=[{refused},{refused}/two]", "server_timeout_s=0"]
    plan = load_plan("demo", "onpolicy_distill", overrides, pure=True, runnable=False)
    assert [server.key for server in servers_of(plan)] == ["teacher.http.url"] * 2
    with pytest.raises(RunError) as error:
        check_reach(plan, StartupProgress(say=lambda line: None))
    for fact in ("teacher.http.url", refused, f"{refused}/two", "roll-opd serve", "server_timeout_s"):
        assert fact in str(error.value)
    judge = RewardTerm("judge", "llm_judge", FrozenDict({"judge_api_url": f"{refused}/v1", "judge_model_name": "j"}))
    far = RewardTerm("far", "remote", FrozenDict({"url": f"{refused}/score"}))
    rewards = tuple(RewardPlan(domain=term.name, terms=(term,)) for term in (judge, far))
    plan = replace(plan, teachers=(), rewards=rewards)
    found = {(server.key, server.url) for server in servers_of(plan)}
    assert found == {("rewards.judge, judge_api_url", f"{refused}/v1"), ("rewards.far, url", f"{refused}/score")}
    assert not list(servers_of(replace(plan, num_nodes=2)))  # loopback is another host there
    check_reach(replace(plan, rewards=()), StartupProgress(say=lambda line: None))
