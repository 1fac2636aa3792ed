"""A service for rewards, judges, workflows and teachers. It answers requests of all kinds, and fails on a signal.

python tests/pipelines/outage_service.py PORT
"""

import json
import signal
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path

SIGNALS = {  # that begin and end an outage
    "hangs": (signal.SIGSTOP, signal.SIGCONT),
    "answers 503": (signal.SIGUSR1, signal.SIGUSR1),
    "answers with garbage": (signal.SIGUSR2, signal.SIGUSR2),
}


def serve(port: int) -> None:
    """Answer requests until the process ends."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "teachers"))
    sys.argv = ["service", "teacher"]
    import teacher_server

    faults: set[str] = set()
    for how, (number, _) in SIGNALS.items():
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_, how=how: faults.symmetric_difference_update({how}))

    class Handler(teacher_server.Handler):
        def do_POST(self) -> None:
            if faults:
                self.rfile.read(int(self.headers["Content-Length"]))
                return self._send({}, 503) if "503" in str(faults) else self._send({"data": "<html>"}, cut=True)
            if self.path == "/score":
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                return self._send({"rewards": [float(len(str(sample)) % 2) for sample in body["samples"]]})
            if self.path.endswith("/chat/completions"):
                self.rfile.read(int(self.headers["Content-Length"]))
                return self._send({"choices": [{"message": {"content": "YES"}, "finish_reason": "stop"}]})
            return super().do_POST()

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        allow_reuse_address = True

    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
