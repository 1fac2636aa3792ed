"""Real vLLM servers, as `roll-opd serve` starts them: log-probs and learning as with Megatron teachers."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import SMALL, Run, launch
from transformers import AutoModelForCausalLM

from roll_opd.config.plan import HttpPlan
from roll_opd.teachers.http_checks import check_server
from roll_opd.teachers.http_protocols import Question
from roll_opd.teachers.http_teacher import HttpScorer
from roll_opd.teachers.teacher_interface import TokenSequence

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
TEACHER, OTHER = Path("examples/demo/models/teacher"), Path("examples/demo/models/other_tokenizer")
VOCABULARY, START_SECONDS = 320, 400
SEQUENCES: list[TokenSequence] = [
    (np.random.default_rng(n).integers(0, VOCABULARY, 8 + 7 * n), 1 + 3 * (n % 4)) for n in range(8)
]


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """The address of a server that `roll-opd serve` starts, in f32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--dtype", "fp32", "--topk", "-1", "--port", address.split(":")[1], "--name", "demo", "--max-model-len"]
    with log.open("w") as sink:
        command = [sys.executable, "-m", "roll_opd", "serve", str(model), *options, "129"]
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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(TEACHER, tmp_path_factory.mktemp("server") / "log") as address:
        yield address


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


def sampled() -> list[TokenSequence]:
    """Sequences from the teacher."""
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
    found = []
    for n in range(8):
        torch.manual_seed(n)
        prompt = torch.randint(0, VOCABULARY, (1, 1 + 3 * (n % 4)))
        ids = model.generate(prompt, do_sample=True, max_new_tokens=8 + 7 * n, top_k=0, eos_token_id=None)
        found.append((ids[0].numpy(), prompt.shape[1]))
    return found


def test_log_probs_are_the_megatron_teachers_up_to_the_rounding_of_f32(url: str, tmp_path: Path) -> None:
    """Both compute in f32 with other orders of sums: single tokens differ by up to 1.7e-5, means by much less."""
    sequences = sampled()
    rows = [{"id": str(n), "tokens": t.tolist(), "prompt_length": p} for n, (t, p) in enumerate(sequences)]
    (tmp_path / "rows").write_text("\n".join(map(json.dumps, rows)))
    files = ["--input", str(tmp_path / "rows"), "--output", str(tmp_path / "out")]
    subprocess.run([sys.executable, "-m", "roll_opd", "score", "--model", str(TEACHER), *files], check=True)
    expected = [json.loads(line)["logprobs"] for line in (tmp_path / "out").read_text().splitlines()]
    answers = asyncio.run(scorer(url).score(sequences, 1.0))
    gaps = [answer.logprobs - np.array(one) for answer, one in zip(answers, expected, strict=True)]
    assert np.abs(np.concatenate(gaps)).max() < 5e-5
    assert abs(np.concatenate(gaps).mean()) < 2e-6


def section(url: str, model: Path | None = None) -> tuple[str, ...]:
    read = f", model_args: {{model_name_or_path: {model}}}" if model else ""
    return "~teacher", f"+teacher={{http: {{url: '{url}'}}{read}}}"


def test_the_demo_learns_from_a_server_as_from_megatron(url: str, tmp_path: Path) -> None:
    shared = ["validation.evaluate_teacher=false", "max_steps=24", "eval_steps=24", "save_steps=0"]
    local = launch(tmp_path / "local", *shared)
    remote = launch(tmp_path / "remote", *section(url), *shared)
    assert local.code == remote.code == 0, remote.output[-4000:]
    found, expected = (json.loads((run.path / "summary.json").read_text()) for run in (remote, local))
    assert abs(found["reverse_kl_first"] - expected["reverse_kl_first"]) < 0.02 * expected["reverse_kl_first"]
    assert found["reverse_kl_last"] < 1.15 * expected["reverse_kl_last"] < 0.5 * expected["reverse_kl_first"]
    assert found["teacher_tokens_sent"]["teacher"] > 24 * 256 * 10
    accuracy = [run.rows("metrics.jsonl")[-1]["val_correct/all/mean"] for run in (local, remote)]
    assert accuracy[1] > 0.9 * accuracy[0] > 0.6
    assert remote.rows("metrics.jsonl")[-1]["opd/teacher/teacher/token_share"] == 1


def test_a_server_with_another_tokenizer_gives_the_megatron_teachers_log_probs_of_single_tokens(tmp_path: Path) -> None:
    """In the first step, which has the same weights, the samples are the same."""
    spread = "teacher.strategy_args.strategy_config.tensor_model_parallel_size=2"
    small = [one for one in SMALL if not one.startswith(("validation.", spread))]
    common = [*small, "validation=null", "max_steps=1", "save_steps=0", "logged_samples_per_step=64"]
    common += ["teacher_tokenizer_check=align", "student_train.model_args.dtype=fp32"]
    megatron = [f"teacher.model_args.model_name_or_path={OTHER}", "teacher.model_args.dtype=fp32"]
    local = launch(tmp_path / "local", *common, *megatron)
    with serving(OTHER, tmp_path / "log") as address:
        remote = launch(tmp_path / "remote", *section(address, OTHER), *common)
    assert local.code == remote.code == 0, remote.output[-4000:]
    ours, theirs = (of_samples(run) for run in (remote, local))
    assert ours.keys() == theirs.keys() and len(ours) == 64
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], atol=1e-4)
    first = [run.rows("metrics.jsonl")[1]["opd/reverse_kl/mean"] for run in (remote, local)]
    assert first[0] == pytest.approx(first[1], abs=1e-5)


def of_samples(run: Run) -> dict[str, list[float]]:
    """The teacher's log-probs of each sample of a run."""
    return {row["id"]: row["teacher_logprobs"]["teacher"] for row in run.rows("samples.jsonl")}
