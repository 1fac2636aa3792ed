"""Attention over packs whose sequences share a prefix, against plain attention over each sequence."""

from megatron_answers import Answers
from megatron_jobs.layers import WINDOWS


def test_sequences_that_share_their_prompt_attend_as_if_each_were_alone(answers: Answers) -> None:
    found = answers.values("packed_attention")
    assert [case["saved"] for case in found] == [128, 0, 288] * len(WINDOWS)  # without a window, and with two
    for case in found:
        assert case["difference"] < 1e-6 and case["of gradients"] < 1e-5
