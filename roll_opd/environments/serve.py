"""Serve an environment over HTTP, for `env_type: http`: `python -m roll_opd.environments.serve frozen_lake size=6`."""

import argparse
import ipaddress
import json
import signal
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

from roll_opd.base.command_line import DONE, FAILED, USER_ERROR
from roll_opd.environments.factory import check, make
from roll_opd.environments.http_sessions import Episodes, Refused
from roll_opd.environments.interface import EnvironmentFailure

LOOPBACK = "127.0.0.1"
PORT = 8000
MOST_EPISODES = 1024
LARGEST_BODY = 16 << 20


class EnvironmentServer(ThreadingHTTPServer):
    """Serves one kind of environment, a thread a connection."""

    daemon_threads = True
    request_queue_size = 256  # connections that wait to be accepted: all of a batch may come at once

    def __init__(self, env_type: str, config: dict[str, Any], host: str, port: int, episodes: int) -> None:
        """Listen at once; `serve_forever` answers. OSError where the address cannot be had."""
        self.episodes = Episodes(env_type, lambda: make(env_type, **config), episodes)
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address for `env_type: http`."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def server_close(self) -> None:
        """Stop listening, and close all environments."""
        super().server_close()
        self.episodes.close_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # answers are small, and waited for
    server: EnvironmentServer

    def do_POST(self) -> None:
        try:
            self._reply(200, self._played(self._body()))
        except Refused as refused:
            self._reply(refused.status, {"error": refused.message})
        except EnvironmentFailure as error:
            self._reply(422, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # nobody waits for the answer

    def _played(self, asked: dict[str, Any]) -> dict[str, Any]:
        episode, episodes = asked.get("episode"), self.server.episodes
        if not isinstance(episode, str) or not episode:
            raise Refused(400, "episode must be a text that is not empty, the same for all requests of an episode")
        if self.path == "/reset":
            return episodes.reset(episode, _number(asked, "seed", 0))
        if self.path == "/step":
            if not isinstance(asked.get("action"), str):
                raise Refused(400, "action must be a text")
            return episodes.step(episode, _number(asked, "step", 1), asked["action"])
        if self.path == "/close":
            return episodes.close(episode)
        raise Refused(404, f"there is nothing at {self.path[:100]}; known are /reset, /step and /close")

    def _body(self) -> dict[str, Any]:
        try:
            size = int(self.headers["Content-Length"])
        except (TypeError, ValueError):
            size = -1
        if not 0 <= size <= LARGEST_BODY:
            self.close_connection = True  # what follows is a body that is not read
            raise Refused(413, f"the body needs a Content-Length of at most {LARGEST_BODY}")
        try:
            found = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise Refused(400, "the body is no JSON object")
        return found

    def _reply(self, status: int, answer: dict[str, Any]) -> None:
        try:
            body = json.dumps(answer, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            status, body = 422, json.dumps({"error": f"info is not JSON: {error}; return plain values"}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: a line a turn would be many."""


def _number(asked: dict[str, Any], key: str, least: int) -> int | None:
    value = asked.get(key)
    if value is not None and (type(value) is not int or value < least):
        raise Refused(400, f"{key} must be a whole number of at least {least}, or null")
    return value


def _plain(value: Any) -> Any:
    """Return numpy's numbers and arrays as Python's; TypeError for what JSON does not know."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    raise TypeError(f"a {type(value).__name__}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted; return the exit code: 2 for what cannot be served, before anything listens."""
    parser = argparse.ArgumentParser("python -m roll_opd.environments.serve", description=(__doc__ or "").split(",")[0])
    parser.add_argument("env_type", help="a name as in a configuration: frozen_lake, my_envs.MyGame, game:Wordle-v0")
    parser.add_argument("config", nargs="*", metavar="key=value", help="arguments of the environment, values as YAML")
    parser.add_argument("--host", default=LOOPBACK, help=f"address to listen at; {LOOPBACK}: this machine alone")
    parser.add_argument("--port", type=int, default=PORT, help=f"{PORT} by default; 0: any that is free")
    parser.add_argument("--episodes", type=int, default=MOST_EPISODES, help="environments at once, at most")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = _config(options.config)
    except EnvironmentFailure as error:
        return _told(str(error), USER_ERROR)
    problems = check(options.env_type, config)
    if not 0 <= options.port < 65536:
        problems.append(f"--port is {options.port}; give one from 0 to 65535")
    if options.episodes < 1:
        problems.append(f"--episodes is {options.episodes}; give at least 1")
    if problems:
        return _told("\n  ".join(problems), USER_ERROR)
    try:
        server = EnvironmentServer(options.env_type, config, options.host, options.port, options.episodes)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        return _told(f"cannot listen at {where}: {error}; give another --host or --port", FAILED)
    if not _is_loopback(str(server.server_address[0])):
        _told("whoever can reach this address can play and stop episodes: there is no password", DONE)
    print(f"serving {options.env_type} at {server.url}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return DONE


def _config(words: Sequence[str]) -> dict[str, Any]:
    config = {}
    for word in words:
        key, given, value = word.partition("=")
        if not given or not key.isidentifier():
            raise EnvironmentFailure(f"{word!r} is no argument; write key=value, such as size=6")
        try:
            config[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise EnvironmentFailure(f"{word!r}: the value is no YAML: {error}; quote it") from None
    return config


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _told(message: str, code: int) -> int:
    print(f"serve: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs begin with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
