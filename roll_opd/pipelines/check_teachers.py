"""Check the teachers' servers when a run starts."""

import asyncio
from collections.abc import Sequence

from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.config.plan import RunPlan
from roll_opd.teachers.scoring import Teacher


async def check_teachers(plan: RunPlan, teachers: Sequence[Teacher], starting: StartupProgress) -> None:
    """Check all teachers whose scorer has a method `check`, concurrently. Raises RunError for the first problem."""
    checks = [(one.plan, check) for one in teachers if (check := getattr(one.scorer, "check", None))]
    await asyncio.gather(
        *[starting.of(f"{teacher.name} ({teacher.source.location})", check(plan, teacher)) for teacher, check in checks]
    )
