"""A launcher of pure distillation whose updates take at least a stated time, as if the learner had other devices.

Only for `async_table.py`: it takes the arguments of `examples/start_onpolicy_distill_pipeline.py`, and the seconds of a
step's updates from the environment variable STATED_SECONDS.
"""

import asyncio
import os
import sys
from typing import Any

from roll_opd.commands.run import main
from roll_opd.workers.student import Student

SECONDS = "STATED_SECONDS"
_LEARN = Student.learn


async def learn_in_stated_time(student: Student, *arguments: Any) -> Any:
    """Make the updates of a step, and wait until the stated time has passed since the start."""
    waiting = asyncio.sleep(float(os.environ[SECONDS]))
    learned, _ = await asyncio.gather(_LEARN(student, *arguments), waiting)
    return learned


if __name__ == "__main__":
    setattr(Student, "learn", learn_in_stated_time)  # noqa: B010
    sys.exit(main("pure distillation with updates of a stated time", pure=True))
