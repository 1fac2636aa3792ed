"""A launcher of pure distillation whose reverse KL uses the log-probs from sampling instead of the learner's own.

Only for comparison (`async_table.py`): the advantage is -coef · (l_sampling - q), and the ratio of the policy loss is
exp(l_now - l_sampling). It takes the arguments of `examples/start_onpolicy_distill_pipeline.py`.
"""

import sys
from collections.abc import Sequence
from typing import Any

from roll_opd.commands.run import main
from roll_opd.samples.sample import Sample
from roll_opd.workers.student import Student

_LEARN = Student.learn


async def learn_from_stored(student: Student, experiences: Sequence[Sample], *arguments: Any) -> Any:
    """Make the updates of a step with the log-probs from sampling as old log-probs."""
    stored = [sample.with_columns(old_logprobs=sample.rollout_logprobs) for sample in experiences]
    return await _LEARN(student, stored, *arguments)


if __name__ == "__main__":
    setattr(Student, "learn", learn_from_stored)  # noqa: B010
    sys.exit(main("pure distillation from stored log-probs", pure=True))
