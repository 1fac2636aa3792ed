"""Rotary embeddings of packs: same bits as megatron-core, also of the gradient."""

from megatron_answers import Answers
from megatron_jobs.layers import ROTATED


def test_bits_and_gradients_are_megatron_cores(answers: Answers) -> None:
    assert answers.values("rotated") == [[True] * 4] * len(ROTATED)
