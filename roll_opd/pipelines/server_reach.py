"""Test at the start of a run whether the servers of its configuration accept connections.

A server that answers, even with an error such as 503, is up: its clients wait for it. A server to which no connection
is possible ends the run after `server_timeout_s`.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from roll_opd.base.addresses import address_fault, is_loopback, proxy_of
from roll_opd.base.failures import RunError
from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.config.plan import HttpPlan, RewardPlan, RunPlan
from roll_opd.pipelines.user_code import task_keys
from roll_opd.rewards.reward_registry import REWARDS

CONNECT_SECONDS = 4.0  # time limit of one attempt, and of the wait for the first byte of an answer
PAUSE_SECONDS = 0.5  # between attempts
PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
CLOSED = "connections are closed without an answer"
SERVE = "start it there with `roll-opd serve MODEL`"


@dataclass(frozen=True)
class Server:
    """A server that a run needs: the configuration key of its address, the address, and how to start it."""

    key: str
    url: str
    remedy: str = "start it"


def check_reach(plan: RunPlan, starting: StartupProgress) -> None:
    """Connect to all servers of the run. Raises RunError with one line for each that accepts no connection."""
    servers = list(dict.fromkeys(servers_of(plan)))
    found: dict[Server, str | None] = {}

    def work(server: Server) -> None:
        found[server] = unreachable(server.url, plan.server_timeout_s)

    # a resolver may block for long, so these threads do not delay the end of the process
    threads = [threading.Thread(target=work, args=(server,), daemon=True) for server in servers]
    until = time.monotonic() + plan.server_timeout_s + 2 * CONNECT_SECONDS
    if not servers:
        return
    with starting.waiting_for(", ".join(server.url for server in servers)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    down = {server: found.get(server, "its name is not resolved") for server in servers if found.get(server, "")}
    if down:
        texts = [f"{one.key}: {one.url} accepts no connection: {why}; {one.remedy}" for one, why in down.items()]
        wait = f"for a server that is being started, set server_timeout_s (now {plan.server_timeout_s:g})"
        raise RunError(f"{'. '.join(texts)}; or correct the address; {wait}")


def servers_of(plan: RunPlan) -> Iterator[Server]:
    """Yield the servers of teachers, rewards, auxiliary models and environments."""
    for teacher in plan.teachers:
        if isinstance(source := teacher.source, HttpPlan):
            how = SERVE if source.server.startswith("vllm") else "start it"
            yield from (Server(f"{source.name}.http.url", url, how) for url in source.url)
    elsewhere = [*_of_rewards(plan.rewards), *_of_workflow(plan)]
    # on several hosts, the driver's loopback address is not that of the workers
    yield from (one for one in elsewhere if plan.num_nodes == 1 or not is_loopback(urlsplit(one.url).hostname or ""))


def _of_rewards(rewards: Sequence[RewardPlan]) -> Iterator[Server]:
    for reward in rewards:
        for term in reward.terms:
            if not REWARDS.facts(term.worker).asks_a_service or reward.engine:
                continue
            for name, value in term.args.items():
                if name.endswith("url") and isinstance(value, str) and address_fault(value) is None:
                    yield Server(f"rewards.{reward.domain}, {name}", value)


def _of_workflow(plan: RunPlan) -> Iterator[Server]:
    for model in plan.workflow.auxiliary_models if plan.workflow else ():
        if model.base_url:
            yield Server(f"auxiliary model {model.name}, base_url", model.base_url)
    yield from (Server(*server) for server in task_keys(plan).servers(plan))


def unreachable(url: str, seconds: float) -> str | None:
    """Return why no connection to a server, or to its proxy, is possible; None if it is up.

    Attempts are made for `seconds`, and at least once.
    """
    end = time.monotonic() + seconds
    while (why := _attempt(url)) is not None and time.monotonic() + PAUSE_SECONDS < end:
        time.sleep(PAUSE_SECONDS)
    return why


def _attempt(url: str) -> str | None:
    parts, through = urlsplit(url), ""
    with contextlib.suppress(ValueError):  # a client reports a proxy that cannot be used
        if proxy := proxy_of(url):
            parts, through = urlsplit(proxy.url), f" (the proxy {proxy})"
    place: Any = (parts.hostname, parts.port or PORTS[parts.scheme])
    try:
        connection = socket.create_connection(place, CONNECT_SECONDS)
    except TimeoutError:
        return f"no connection in {CONNECT_SECONDS:g} s{through}"
    except socket.gaierror:
        return f"the name {parts.hostname} cannot be resolved{through}"
    except OSError as error:
        return f"{error.strerror or error}{through}"
    with connection:
        # a tunnel, or a port of a container, accepts connections whether or not its server runs
        return None if through or parts.scheme != "http" or _is_heard(connection, parts.netloc) else CLOSED


def _is_heard(connection: socket.socket, host: str) -> bool:
    """Return whether a server answers a request, or keeps the connection open because it is busy."""
    try:
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False
