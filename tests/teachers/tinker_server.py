"""A server with the paths that the package `tinker` uses to score tokens, and the model of `teacher_server`.

Answers are protobuf messages of the package. `script` has the faults of the next requests: a status, "user" or "server"
(a failed request), "short" (log-probs of other tokens), "slow".
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import numpy as np
from teacher_server import SLOW_SECONDS, logprobs_after
from tinker.proto import tinker_public_pb2 as proto


def answer_of(body: dict[str, Any], fault: str) -> bytes:
    """Return the SampleResponse of a request."""
    tokens = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
    tokens = tokens[:-1] if fault == "short" else tokens
    first = len(tokens) - body["prompt_logprobs_last_n"]
    rows = np.array([logprobs_after(tokens[:n]) for n in range(1, len(tokens))], np.float32)
    own = np.array([np.nan, *rows[np.arange(len(rows)), tokens[1:]]], np.float32)
    own[:first] = np.nan
    answer = proto.SampleResponse(prompt_logprobs=own.tobytes())
    answer.sequences.add(stop_reason=proto.STOP_REASON_LENGTH, tokens=np.array([1], np.int32).tobytes())
    if k := body.get("topk_prompt_logprobs"):
        ids, best = np.zeros((len(tokens), k), np.int32), np.full((len(tokens), k), -99999, np.float32)
        ids[first:] = np.argsort(-rows, 1)[first - 1 :, :k]
        best[first:] = np.take_along_axis(rows, ids[1:], 1)[first - 1 :]
        answer.topk_prompt_logprobs.length, answer.topk_prompt_logprobs.k = len(tokens), k
        answer.topk_prompt_logprobs.token_ids, answer.topk_prompt_logprobs.logprobs = ids.tobytes(), best.tobytes()
    if wanted := body.get("target_prompt_logprobs"):
        ids = np.array(wanted["data"]).reshape(wanted["shape"])
        values = np.where(ids < 0, 0, np.take_along_axis(rows, ids.clip(0), 1)).astype(np.float32)
        answer.target_prompt_logprobs.dense = values.tobytes()
        answer.target_prompt_logprobs.dtype = proto.DTYPE_FLOAT32
        answer.target_prompt_logprobs.shape.extend(values.shape)
    return answer.SerializeToString()


class TinkerServer(ThreadingHTTPServer):
    """Faults to come, and requests so far."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), TinkerHandler)
        self.script: list[str] = []
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.answers: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class TinkerHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TinkerServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        path = self.path.rpartition("/")[2]
        self.server.seen.append((path, dict(self.headers), body))
        if path == "config":
            self._send({"use_pyqwest_transport": False})
        elif path == "create_session":
            self._send({"type": "create_session", "session_id": "session"})
        elif path == "create_sampling_session":
            model = body.get("base_model") or body.get("model_path")
            self._send({"sampling_session_id": "sampler"} if model.endswith("toy") else {"detail": "no such model"})
        elif path == "session_heartbeat":
            self._send({"type": "session_heartbeat"})
        elif path == "asample":
            self._accept(body)
        elif path == "retrieve_future":
            self._send(self.server.answers[body["request_id"]])
        else:
            self._send({}, 404)

    def do_GET(self) -> None:
        self._send({"sampler_id": "sampler", "base_model": "org/toy", "model_path": None})

    def _accept(self, body: dict[str, Any]) -> None:
        fault = self.server.script.pop(0) if self.server.script else ""
        if fault.isdigit():
            return self._send({"detail": f"asked for, {self.headers['X-API-Key']}"}, int(fault))
        if fault == "slow":
            time.sleep(SLOW_SECONDS)
        number = f"request-{len(self.server.answers)}"
        failed = {"error": "asked for", "category": fault} if fault in ("user", "server") else None
        self.server.answers[number] = failed or answer_of(body, fault)
        return self._send({"request_id": number, "sample_sequence_ids": ["one"]})

    def _send(self, answer: Any, status: int = 200) -> None:
        is_proto = isinstance(answer, bytes)
        content = answer if is_proto else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf" if is_proto else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def tinker_service() -> Iterator[TinkerServer]:
    with TinkerServer() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
