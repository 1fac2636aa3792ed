"""The hosts of a run connect and are checked: processes and threads of one machine, over its loopback interface."""

import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll_opd.cluster.multihost import host_facts
from roll_opd.cluster.multihost.host_facts import LaunchedHost, LaunchError
from roll_opd.cluster.multihost.hosts import HeartbeatChannel, Hosts
from roll_opd.cluster.ray_environment import token_variables
from roll_opd.models.hub_models import complete
from roll_opd.models.model_info import whole_model
from tests.hub_server import serve

DEMO_STUDENT = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"
FACTS: dict[str, Any] = {"name": "b", "gpus": 0, "versions": {"python": "3.11.7", "ray": "2.60.0"}}


class Other:
    """A host that a test controls."""

    def __init__(self, port: int, rank: int = 1, **facts: Any) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.channel = HeartbeatChannel(socket.create_connection(("127.0.0.1", port)), self.inbox)
        self.channel.send(rank=rank, size=2, **{**host_facts.facts(), **facts})

    def heard(self, key: str) -> Any:
        """Return the next message that contains `key`."""
        while True:
            _, message = self.inbox.get(timeout=10)
            assert message is not None
            if key in message:
                return message[key]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    opened = Hosts(LaunchedHost(0, 2, "127.0.0.1", port), again=7.0)
    yield opened
    opened._listener.close()


def port(hosts: Hosts) -> int:
    return int(hosts._host.port)


def test_a_late_host_is_named(hosts: Hosts) -> None:
    with pytest.raises(LaunchError, match=r"host 1 of 2 has not joined within 0.2 s \(host_timeout_s\)"):
        hosts.gather(0.2, print)


def test_a_host_may_reconnect(hosts: Hosts) -> None:
    Other(port(hosts)).channel.close()
    time.sleep(0.2)
    second = threading.Timer(0.3, lambda: Other(port(hosts)))
    second.start()
    hosts.gather(10, print)


def test_two_hosts_of_one_rank_and_strangers(hosts: Hosts) -> None:
    socket.create_connection(("127.0.0.1", port(hosts))).sendall(b"GET / HTTP/1.1\r\n\r\n")
    Other(port(hosts), rank=5)
    with pytest.raises(LaunchError, match="reports rank 5 of 2"):
        hosts.gather(1, print)


def test_a_host_of_another_run_is_refused(hosts: Hosts) -> None:
    """Also on the same machine, because two runs may have one MASTER_PORT. A host that connects again knows its run."""
    first = Other(port(hosts))
    hosts.gather(10, print)
    assert first.heard("again") == 7.0
    another = Other(port(hosts))
    asked = threading.Thread(target=lambda: hosts._take(time.monotonic() + 1))
    asked.start()
    assert another.heard("end") == 2
    asked.join()
    assert "reports rank 1 of 2, as 127.0.0.1 does" in hosts._refused[-1]
    hosts._channels[1].send(still="there")
    assert first.heard("still") == "there"


def test_versions_models_and_the_directory_are_compared(hosts: Hosts, tmp_path: Path) -> None:
    model, absent = tmp_path / "model", tmp_path / "out" / "runs"
    model.mkdir()
    (model / "config.json").write_text("{}")
    other = Other(port(hosts), versions={**host_facts.versions(), "ray": "1.0"})
    hosts.gather(10, print)
    assert other.heard("again") == 7.0

    def answer() -> None:
        assert other.heard("check")["models"] == [str(model)]
        other.channel.send(models={str(model): {}}, answer="")

    threading.Thread(target=answer).start()
    with pytest.raises(LaunchError) as caught:
        hosts.check([str(model)], str(absent), devices=2)
    version, missing, directory = caught.value.problems
    assert "has ray 1.0 and host 0 has" in version
    assert f"has no model at {model} (no config.json)" in missing
    assert f"does not share {absent}" in directory
    assert not absent.parent.exists()  # nothing is left of the check


def test_other_hosts_download_models_by_name(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is removed after host 0 has filled it, so that the other host, in this process, finds it empty."""
    repository = tmp_path / "hub" / "models" / "org" / "model"
    shutil.copytree(DEMO_STUDENT, repository)
    other = Other(port(hosts))
    hosts.gather(10, print)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with serve(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        path = whole_model("org/model", print)
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        for wanted in (files, {}):
            shutil.rmtree(tmp_path / "home")
            if not wanted:
                shutil.rmtree(repository)

            def answer() -> None:
                other.channel.send(problems=complete(**other.heard("download"), say=print))

            threading.Thread(target=answer).start()
            if wanted:
                hosts.download([str(DEMO_STUDENT), str(path)])
                assert {file.name: file.read_bytes() for file in path.iterdir()} == wanted
                continue
            with pytest.raises(LaunchError, match=r"host 1 .*: org/model@\w{40}: .*HTTP 401"):
                hosts.download([str(path)])


@pytest.mark.parametrize(
    ("environment", "reported"),
    [
        ({"RAY_AUTH_TOKEN": "a"}, {"RAY_AUTH_TOKEN": "a"}),
        ({"RAY_AUTH_TOKEN_PATH": "{file}"}, {"RAY_AUTH_TOKEN": "of the file"}),
        ({"RAY_AUTH_MODE": "token", "HOME": "{home}"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of home"}),
        ({"RAY_AUTH_MODE": "disabled", "HOME": "{home}"}, {"RAY_AUTH_MODE": "disabled"}),
        ({"RAY_AUTH_MODE": "token", "HOME": "/no/such"}, {"RAY_AUTH_MODE": "token"}),
    ],
)
def test_other_hosts_receive_the_token_from_environment_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], reported: dict[str, str]
) -> None:
    """Ray takes it from the environment, from a file that this names, or from one in the home directory."""
    (tmp_path / "token").write_text("of the file\n")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of home")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(file=tmp_path / "token", home=tmp_path))
    assert token_variables() == reported


def test_hosts_receive_the_exit_code_of_the_run(hosts: Hosts, tmp_path: Path) -> None:
    other = Other(port(hosts))
    hosts.gather(10, print)

    def answer() -> None:
        other.channel.send(**host_facts.look(**other.heard("check")))
        assert other.heard("join")["slots"] == 2
        other.channel.send(node=True)

    threading.Thread(target=answer).start()
    hosts.check([], str(tmp_path), devices=2)
    hosts.join("10.0.0.1:6379", 2, 10)
    assert not list(tmp_path.iterdir())
    lost: queue.Queue[str] = queue.Queue()
    hosts.watch(lost.put)
    other.channel.send(failed="Ray's raylet (killed by signal 9) has ended", node=True)
    assert lost.get(timeout=10).endswith("127.0.0.1): Ray's raylet (killed by signal 9) has ended")
    hosts.end(3)
    assert other.heard("end") == 3


def test_the_end_of_a_host_is_reported(hosts: Hosts) -> None:
    other = Other(port(hosts))
    hosts.gather(10, print)
    lost: queue.Queue[str] = queue.Queue()
    hosts.watch(lost.put)
    other.channel.close()
    assert "is lost" in lost.get(timeout=10)


def test_missing_model_files_are_a_problem() -> None:
    whole = {"/m": {"config.json": 2, "model.safetensors": 10}}
    (problem,) = host_facts.model_problems(whole, {"/m": {"config.json": 2, "model.safetensors": 9}})
    assert "has a missing or different model.safetensors in /m" in problem
    assert host_facts.model_problems(whole, {"/m": {**whole["/m"], "README.json": 1}}) == []


@pytest.mark.parametrize(("own", "other", "problems"), [(0, 0, 0), (8, 8, 0), (8, 4, 1), (0, 8, 1), (8, 0, 1)])
def test_hosts_with_other_numbers_of_gpus_are_refused(own: int, other: int, problems: int) -> None:
    found = host_facts.differences({**FACTS, "gpus": own}, {**FACTS, "gpus": other}, devices=8)
    assert len(found) == problems


def test_a_worker_without_a_driver_reports_it() -> None:
    program = (
        "import sys; from roll_opd.cluster.multihost import multihost_worker as member\n"
        "from roll_opd.cluster.multihost.host_facts import LaunchedHost\n"
        "member.FIRST_CONNECT_S = 0.5\n"
        "one = member._Worker(LaunchedHost(1, 2, '127.0.0.1', 9), print); one._again = 0.5\n"
        "sys.exit(one.serve())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no connection to host 0 at 127.0.0.1:9 within 0.5 s" in done.stdout
