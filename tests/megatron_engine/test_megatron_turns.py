"""Trainers whose memory is given back and taken back between all that they do learn what others learn, to the bit."""

import json

import megatron_cases as cases
import pytest
import torch
from megatron_answers import Answers

JOBS = [job for world in (1, 2) for job in cases.turns_jobs(world)]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["name"])
def test_what_is_learned_is_the_same_bit_for_bit(answers: Answers, job: dict) -> None:
    """Weights, losses and gradient norms; what every order of phases leaves is held in the workers themselves."""
    name, other = job["name"], job["as"]
    assert json.loads((answers.root / f"{name}.json").read_text()) == json.loads(
        (answers.root / f"{other}.json").read_text()
    )
    found, wanted = answers.weights(name), answers.weights(other)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["name"])
def test_memory_is_given_back(answers: Answers, job: dict) -> None:
    """All that an update held, and while the weights are away nothing else is left."""
    sizes = json.loads((answers.root / f"{job['name']}-sizes.json").read_text())
    whole = max(sum(size.values()) for size in sizes)
    away = [size for size in sizes if not size["weights"]]
    assert whole > 0 and len(away) > 20
    assert all(sum(size.values()) == 0 for size in away)
