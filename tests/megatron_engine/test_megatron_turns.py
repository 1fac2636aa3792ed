"""Trainers that offload their memory between all calls learn the same bits as other trainers."""

import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import turns

from tests.cover import cover, tiered

JOBS = [job for job in turns.turns_jobs()]
PARAMS = tiered(JOBS, cover(JOBS, of=lambda job: (job["op"], job.get("dtype"))))


@pytest.mark.parametrize("job", PARAMS, ids=lambda job: job["name"])
def test_what_is_learned_is_the_same_bit_for_bit(answers: Answers, job: dict) -> None:
    """Weights, losses and gradient norms; the workers themselves check the memory after every order of phases."""
    name, other = job["name"], job["as"]
    assert answers.values(f"{name}") == answers.values(f"{other}")
    found, wanted = answers.weights(name), answers.weights(other)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted)


@pytest.mark.parametrize("job", PARAMS, ids=lambda job: job["name"])
def test_memory_is_given_back(answers: Answers, job: dict) -> None:
    """All memory of an update is released; while the weights are offloaded, no other memory remains."""
    sizes = answers.values(f"{job['name']}-sizes")
    whole = max(sum(size.values()) for size in sizes)
    away = [size for size in sizes if not size["weights"]]
    assert whole > 0 and len(away) > 20
    assert all(sum(size.values()) == 0 for size in away)
