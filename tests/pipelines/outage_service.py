"""A service for rewards, judges, workflows and teachers. It answers requests of all kinds, and fails on a signal.

python tests/pipelines/outage_service.py PORT [TEXT]

With a TEXT it ends when a request contains it.
"""

import io
import json
import os
import signal
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path

SIGNALS = {  # that begin and end an outage
    "hangs": (signal.SIGSTOP, signal.SIGCONT),
    "answers 503": (signal.SIGUSR1, signal.SIGUSR1),
    "answers with garbage": (signal.SIGUSR2, signal.SIGUSR2),
}


def serve(port: int, *ends_with: str) -> None:
    """Answer requests until the process ends, or until a request contains the text `ends_with`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "teachers"))
    sys.argv = ["service", "teacher"]
    import teacher_server

    faults: set[str] = set()
    for how, (number, _) in SIGNALS.items():
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_, how=how: faults.symmetric_difference_update({how}))

    class Handler(teacher_server.Handler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if any(text.encode() in data for text in ends_with):
                os._exit(1)
            if faults:
                return self._send({}, 503) if "503" in str(faults) else self._send({"data": "<html>"}, cut=True)
            if self.path == "/score":
                body = json.loads(data)
                return self._send({"rewards": [float(len(str(sample)) % 2) for sample in body["samples"]]})
            if self.path.endswith("/chat/completions"):
                return self._send({"choices": [{"message": {"content": "YES"}, "finish_reason": "stop"}]})
            connection, self.rfile = self.rfile, io.BytesIO(data)
            super().do_POST()
            self.rfile = connection

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        allow_reuse_address = True

    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:])
