"""A server process with a small model that supports all protocols of teachers, and fails on request.

python teacher_server.py NAME prints its port. POST /script sets the faults of the next requests to score, or of all
(`always`); GET /seen returns the requests. The model: the logits after a context come from a generator that the
context seeds.
"""

import base64
import io
import json
import socket
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np

VOCABULARY = 512
SLOW_SECONDS = 1.2


def logprobs_after(context: list[int], noise: float = 0.0, weights: float = 0.0) -> np.ndarray:
    """Return the log-probs of all tokens after a context, f64 [V].

    Each scoring has other `noise`. With other `weights`, each logit differs by the same value in every scoring.
    """
    logits = np.random.default_rng([len(context), *context]).normal(size=VOCABULARY) * 2
    logits += noise * np.random.default_rng().normal(size=VOCABULARY)
    logits += weights * np.random.default_rng([1, len(context), *context]).normal(size=VOCABULARY)
    return logits - np.log(np.exp(logits).sum())


class Model:
    """Answers of one sequence in the form of each protocol."""

    def __init__(self, tokens: list[int], noise: float, weights: float) -> None:
        self.tokens = tokens
        self.rows = [logprobs_after(tokens[:n], noise, weights) for n in range(1, len(tokens))]  # of token n

    def by_id(self, k: int) -> list[Any]:
        rows: list[Any] = [None]
        for token, row in zip(self.tokens[1:], self.rows, strict=True):
            order = np.argsort(-row)
            shown = {int(token), *order[: len(row) if k < 0 else k].tolist()}
            rank = {int(one): place for place, one in enumerate(order.tolist(), 1)}
            rows.append({str(one): {"logprob": float(row[one]), "rank": rank[one]} for one in shown})
        return rows

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("echo"):
            values = [None, *(float(row[t]) for row, t in zip(self.rows, self.tokens[1:], strict=True)), -0.5]
            found = {"token_logprobs": values, "tokens": ["x"] * len(values), "token_ids": [*self.tokens, 0]}
            return {"choices": [{"logprobs": found}]}
        return {"choices": [{"prompt_logprobs": self.by_id(body["prompt_logprobs"])}]}

    def token_server(self, sampling: dict[str, Any]) -> dict[str, Any]:
        start, ids = sampling["prompt_logprob_start"], sampling["prompt_logprob_token_ids"]
        array = np.array([row[wanted] for row, wanted in zip(self.rows[start:], ids, strict=True)], np.float32)
        file = io.BytesIO()
        np.save(file, array)
        k = sampling.get("prompt_logprobs")
        answer = {"prompt_token_id_logprobs": base64.b64encode(file.getvalue()).decode()}
        return answer | ({} if k is None else {"prompt_logprobs": self.by_id(k)})

    def sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        start, union, k = body["logprob_start_len"], body.get("token_ids_logprob"), body["top_logprobs_num"]
        rows, tokens = self.rows[start:], self.tokens[start + 1 :]
        own = [[None, self.tokens[start], None], *([float(r[t]), t, None] for r, t in zip(rows, tokens, strict=True))]
        best = [None, *([[float(r[n]), int(n), None] for n in np.argsort(-r)[:k]] for r in rows)]
        given = [None, *([[float(r[n]), n, None] for n in union or ()] for r in rows)]
        found = {"input_token_logprobs": own, "input_top_logprobs": best, "input_token_ids_logprobs": given}
        return {"meta_info": found}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: ClassVar[dict[str, Any]] = {}
    seen: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        if self.path == "/seen":
            self._send(self.seen)
        else:
            models = self.script.get("models", [sys.argv[1]])
            self._send({"data": [{"id": one, "max_model_len": self.script.get("longest", 4096)} for one in models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/script":
            Handler.script, Handler.seen = body, []
            return self._send({})
        if self.path == "/tokenize":
            found = self.script.get("tokenize")
            return self._send({"tokens": found} if found else {}, 200 if found else 404)
        self.seen.append({"path": self.path, "headers": dict(self.headers), "body": body})
        faults = self.script.get("faults")
        fault = faults.pop(0) if faults else self.script.get("always", "")
        if fault.isdigit():
            return self._send({"error": f"asked for, {self.headers.get('Authorization')}"}, int(fault))
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        if fault == "slow":
            time.sleep(SLOW_SECONDS)
        return self._send(self._answer(body, fault), cut=fault == "cut")

    def _answer(self, body: dict[str, Any], fault: str) -> Any:
        tokens = body.get("prompt") or body.get("token_ids") or body["input_ids"]
        wrong = {"shift": tokens[1:] + tokens[:1], "short": tokens[:-1]}.get(fault, tokens)
        model = Model(wrong, 1.0 if fault == "noise" else 0.0, self.script.get("weights", 0.0))
        if self.path.endswith("/completions"):
            answer = model.completions(body)
        elif self.path == "/generate":
            answer = model.sglang(body)
        else:
            answer = model.token_server(body["sampling_params"])
        if fault in ("null", "inf", "above"):
            place = answer["choices"][0]["prompt_logprobs"][-1]
            place[str(tokens[-1])]["logprob"] = {"null": None, "inf": -9999.0, "above": 0.5}[fault]
        name = "another" if fault == "other_model" else body.get("model", sys.argv[1])
        return [] if fault == "alien" else answer | {"model": name}

    def _send(self, answer: Any, status: int = 200, cut: bool = False) -> None:
        content = json.dumps(answer).encode()
        content = content[: len(content) // 2] if cut else content
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
