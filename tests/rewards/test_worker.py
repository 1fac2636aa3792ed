"""The reward worker: the parts of a row and of the student's answer that a user's reward function gets."""

import asyncio
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from roll_opd.config.plan import DataPlan, RewardPlan, RewardTerm
from roll_opd.data.dataset import open_prompts
from roll_opd.data.templates import load_tokenizer
from roll_opd.inference.vllm_requests import Completion
from roll_opd.rollout.workflow_protocol import sample_of
from roll_opd.samples.sample import Sample, as_columns
from roll_opd.samples.transport import Compact
from roll_opd.workers import reward_pool as module
from roll_opd.workers.reward_pool import RewardWorker

MODEL = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"


def experience(tokens: np.ndarray, prompt_length: int) -> Sample:
    """A step of one and the same run."""
    length = len(tokens) - prompt_length
    return Sample(
        id="a#0/0",
        group_id="a#0",
        tag="t",
        domain="code",
        tokens=tokens,
        prompt_length=prompt_length,
        finish_reason="stop",
        columns=as_columns(action_mask=np.ones(length, bool)),
    )


# of what the question and its cases say, and nothing else
USERS_MODULE = """
def passed(samples):
    scores = []
    for sample in samples:
        numbers = sample.prompt.partition("=")[0].rpartition("user")[2].split("+")
        said = sum(map(int, numbers)) == int(sample.response)
        scores.append(said * sum(case["points"] for case in sample.extra["test_cases"]))
    return scores


def size(samples):
    return [float(len(samples))] * len(samples)
"""


async def scored(worker: RewardWorker, experiences: list[Sample]) -> dict[int, float]:
    """As over Ray."""
    batch = pickle.loads(pickle.dumps(Compact(experiences)))
    answers = [pickle.loads(pickle.dumps(answer)) async for answer in worker.run(batch)]
    return {number: score.value for answer in answers for number, score in answer.results}


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The worker in this process: Ray's actor is a wrapper of the same class."""
    (tmp_path / "my_tests.py").write_text(USERS_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    worker = RewardWorker.__ray_metadata__.modified_class()
    plan = RewardPlan("code", (RewardTerm("passed", "my_tests.passed"),), max_concurrency=2)
    asyncio.run(worker.setup(plan, str(MODEL)))
    return worker


def test_a_users_reward_reads_the_prompt_and_the_rows_other_keys(tmp_path: Path, worker) -> None:
    rows = [
        {"prompt": "1+2=", "test_cases": [{"points": 1}, {"points": 2}], "ground_truth": "unused"},
        {"messages": [{"role": "user", "content": "4+4="}], "test_cases": [{"points": 10}]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(str(MODEL))
    prompts, _ = open_prompts(DataPlan((str(file),), prompt_length=64), tokenizer)

    def answered(draw: int, sample: int, text: str):
        tokens = np.array(tokenizer(text).input_ids)
        completion = Completion(tokens, np.zeros(len(tokens), np.float32), "stop")
        return sample_of(prompts.all()[draw], draw, sample, completion)

    answers = [answered(0, 0, "3"), answered(1, 0, "8"), answered(0, 1, "4"), answered(1, 1, "9")]
    assert asyncio.run(scored(worker, answers)) == {0: 3.0, 1: 10.0, 2: 0.0, 3: 0.0}


def test_each_step_of_a_run_is_read_with_its_own_prompt(worker) -> None:
    tokenizer = load_tokenizer(str(MODEL))
    samples = []
    for number in range(2):
        tokens = np.array(tokenizer(f"{number}+1={number + 1}").input_ids)
        samples.append(experience(tokens, len(tokens) - 1))
    assert [sample.prompt for sample in worker._samples(samples)] == ["0+1=", "1+1="]


@pytest.mark.parametrize(
    ("quick", "sizes"),
    [(30.0, [1, 2, 4, 8, 16, 16, 16, 1]), (0.0, [1] * 64)],
    ids=["one after another, and larger", "side by side, as small as they all can be under way"],
)
def test_calls_grow_while_each_is_quick(
    worker, monkeypatch: pytest.MonkeyPatch, quick: float, sizes: list[int]
) -> None:
    monkeypatch.setattr(module, "QUICK_CALL_S", quick)
    monkeypatch.setattr(module, "SEQUENTIAL_S", 60.0)
    plan = RewardPlan("code", (RewardTerm("size", "my_tests.size"),), max_concurrency=64, batch_size=16)
    asyncio.run(worker.setup(plan, str(MODEL)))
    found = asyncio.run(scored(worker, [experience(np.array([1, 2, 3]), 1)] * 64))
    assert [found[number] for number in range(64)] == [float(size) for size in sizes for _ in range(size)]
