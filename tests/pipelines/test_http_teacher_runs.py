"""A real vLLM server, as `roll-opd serve` starts it, returns the teacher's log-probs."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roll_opd.config.plan import HttpPlan
from roll_opd.teachers.http_checks import check_server
from roll_opd.teachers.http_protocols import Question
from roll_opd.teachers.http_teacher import HttpScorer
from roll_opd.teachers.scorer import TokenSequence

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
TEACHER = Path("examples/demo/models/teacher")
VOCABULARY, START_SECONDS = 320, 400
SEQUENCES: list[TokenSequence] = [
    (np.random.default_rng(n).integers(0, VOCABULARY, 8 + 7 * n), 1 + 3 * (n % 4)) for n in range(8)
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that `roll-opd serve` starts, in f32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--dtype", "fp32", "--topk", "-1", "--port", address.split(":")[1], "--name", "demo", "--max-model-len"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as sink:
        command = [sys.executable, "-m", "roll_opd", "serve", str(TEACHER), *options, "128"]
        server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ})
    deadline = time.monotonic() + START_SECONDS
    try:
        while server.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://{address}/v1/models", timeout=5).read()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(60)


def scorer(url: str) -> HttpScorer:
    return HttpScorer("demo", HttpPlan(name="teacher", url=(url,)), VOCABULARY)


def whole(tokens: np.ndarray, length: int) -> np.ndarray:
    """transformers' log-probs of all tokens at each response token, f32 [T-P, V]."""
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0, length - 1 : -1].log_softmax(-1).numpy()


def test_log_probs_of_the_students_top_k_are_those_of_a_local_computation(url: str) -> None:
    teacher, generator = scorer(url), np.random.default_rng(0)
    asyncio.run(check_server(teacher, TEACHER, "ids", 8, 100))  # the tokenizer too
    for tokens, length in SEQUENCES[:3]:
        rows = whole(tokens, length)
        ids = np.stack([generator.choice(VOCABULARY, 8, replace=False) for _ in rows])
        reply = asyncio.run(teacher.ask(Question(tokens, length, ids=ids)))
        assert reply.topk_logprobs is not None
        np.testing.assert_allclose(reply.topk_logprobs, np.take_along_axis(rows, ids, 1), atol=1e-5)
