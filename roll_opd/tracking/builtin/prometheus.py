"""Tracker that serves the newest metrics over HTTP in Prometheus's text format."""

import re
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from roll_opd.base.terminal import echo
from roll_opd.tracking.run_directory import RunDirectory
from roll_opd.tracking.tracker_registry import register

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "roll_opd_"


@register("prometheus")
class PrometheusTracker:
    """Serves the metrics of the last step at `http://HOST:PORT/metrics` until the run ends.

    The name of a metric has `_` for all characters that Prometheus does not allow, after `roll_opd_`; its label
    `metric` has the name in `metrics.jsonl`.
    """

    def __init__(
        self, run: RunDirectory, resume_step: int | None, *, port: int = 9464, host: str = "127.0.0.1"
    ) -> None:
        """Start the server.

        Args:
            port: 0 chooses a free port.
            host: address to listen on; 0.0.0.0 means all addresses.
        """
        self._labels = {"experiment": run.path.parent.name, "run": run.path.name}
        self._text = exposition({}, self._labels)
        tracker = self

        class Metrics(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == PATH
                body = (tracker._text if is_known else f"the metrics are at {PATH}\n").encode()
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", CONTENT_TYPE if is_known else "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, port), Metrics)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        echo(f"Prometheus: metrics at http://{host}:{self.port}{PATH}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._text = exposition({**metrics, "step": step, "last_step_timestamp_seconds": time.time()}, self._labels)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def exposition(metrics: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Return metrics in Prometheus's text format: one gauge per name, which may have several metrics."""
    families: dict[str, list[str]] = {}
    for name, value in sorted(metrics.items()):
        family = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**labels, "metric": name}.items())
        families.setdefault(family, []).append(f"{family}{{{shown}}} {_number(float(value))}")
    return "".join(f"# TYPE {family} gauge\n" + "\n".join(lines) + "\n" for family, lines in families.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(repr(value), repr(value))
