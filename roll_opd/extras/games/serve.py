"""Serve an environment over HTTP, for `env_type: http`: `python -m roll_opd.extras.games.serve frozen_lake size=6`."""

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
from roll_opd.extras.games.environment_interface import EnvironmentFailure
from roll_opd.extras.games.factory import check, make
from roll_opd.extras.games.http_sessions import Episodes, Refused

LOOPBACK = "127.0.0.1"
PORT = 8000
MAX_EPISODES = 1024
MAX_BODY_BYTES = 16 << 20


class EnvironmentServer(ThreadingHTTPServer):
    """HTTP server of one environment type. Each connection has its own thread."""

    daemon_threads = True
    request_queue_size = 256  # backlog of connections, as a whole batch may connect at the same time

    def __init__(self, env_type: str, config: dict[str, Any], host: str, port: int, episodes: int) -> None:
        """Bind the address and listen. Raises OSError if the address is unavailable.

        `serve_forever` handles the requests.
        """
        self.episodes = Episodes(env_type, lambda: make(env_type, **config), episodes)
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """URL for `env_type: http`."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def server_close(self) -> None:
        """Stop listening and close all environments."""
        super().server_close()
        self.episodes.close_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # low latency for small responses
    server: EnvironmentServer

    def do_POST(self) -> None:
        try:
            self._reply(200, self._played(self._body()))
        except Refused as refused:
            self._reply(refused.status, {"error": refused.message})
        except EnvironmentFailure as error:
            self._reply(422, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client has disconnected

    def _played(self, request: dict[str, Any]) -> dict[str, Any]:
        episode, episodes = request.get("episode"), self.server.episodes
        if not isinstance(episode, str) or not episode:
            raise Refused(400, "episode must be a non-empty string, the same for all requests of an episode")
        if self.path == "/reset":
            return episodes.reset(episode, _number(request, "seed", 0))
        if self.path == "/step":
            if not isinstance(request.get("action"), str):
                raise Refused(400, "action must be a string")
            return episodes.step(episode, _number(request, "step", 1), request["action"])
        if self.path == "/close":
            return episodes.close(episode)
        raise Refused(404, f"unknown path {self.path[:100]}; the known paths are /reset, /step and /close")

    def _body(self) -> dict[str, Any]:
        try:
            size = int(self.headers["Content-Length"])
        except (TypeError, ValueError):
            size = -1
        if not 0 <= size <= MAX_BODY_BYTES:
            self.close_connection = True  # the body has not been read
            raise Refused(413, f"the body needs a Content-Length of at most {MAX_BODY_BYTES}")
        try:
            found = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise Refused(400, "the body is not a JSON object")
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
        """Do nothing: one line per turn would flood the log."""


def _number(request: dict[str, Any], key: str, least: int) -> int | None:
    value = request.get(key)
    if value is not None and (type(value) is not int or value < least):
        raise Refused(400, f"{key} must be an integer of at least {least}, or null")
    return value


def _plain(value: Any) -> Any:
    """Convert numpy values and sets for JSON; raises TypeError for other types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    raise TypeError(f"a {type(value).__name__}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the process is interrupted, and return the exit code.

    The exit code is 2 for invalid arguments.
    """
    parser = argparse.ArgumentParser("python -m roll_opd.extras.games.serve", description=(__doc__ or "").split(",")[0])
    parser.add_argument("env_type", help="a name as in a configuration: frozen_lake, my_envs.MyGame, game:Wordle-v0")
    parser.add_argument(
        "config", nargs="*", metavar="key=value", help="argument of the environment; the value is read as YAML"
    )
    parser.add_argument(
        "--host", default=LOOPBACK, help=f"address to listen on; {LOOPBACK} accepts only clients on this machine"
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"port to listen on; the default is {PORT}, and 0 is any free port"
    )
    parser.add_argument("--episodes", type=int, default=MAX_EPISODES, help="maximum number of concurrent environments")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = _config(options.config)
    except EnvironmentFailure as error:
        return _print_error(str(error), USER_ERROR)
    problems = check(options.env_type, config)
    if not 0 <= options.port < 65536:
        problems.append(f"--port is {options.port}; use a port from 0 to 65535")
    if options.episodes < 1:
        problems.append(f"--episodes is {options.episodes}; use at least 1 episode")
    if problems:
        return _print_error("\n  ".join(problems), USER_ERROR)
    try:
        server = EnvironmentServer(options.env_type, config, options.host, options.port, options.episodes)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        return _print_error(f"cannot listen on {where}: {error}; use another --host or --port", FAILED)
    if not ipaddress.ip_address(str(server.server_address[0])).is_loopback:
        _print_error(
            "warning: the server has no authentication; any client that reaches it can play and stop episodes",
            DONE,
        )
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
            raise EnvironmentFailure(f"{word!r} is not an argument; write key=value, such as size=6")
        try:
            config[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise EnvironmentFailure(f"{word!r}: the value is not YAML: {error}; put the value in quotes") from None
    return config


def _print_error(message: str, code: int) -> int:
    print(f"serve: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs start with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
