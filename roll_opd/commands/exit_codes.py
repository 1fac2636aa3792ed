"""Print why a command has ended, and return its exit code. Imports neither torch nor Ray."""

import sys
import traceback

from roll_opd.base.command_line import FAILED, INTERRUPTED, TERMINATED, USER_ERROR
from roll_opd.base.failures import (
    FULL,
    ConfigError,
    RunError,
    Terminated,
    WorkflowError,
    os_sentence,
    print_unexpected,
    reason,
    shortened,
)
from roll_opd.base.terminal import echo
from roll_opd.data.row_formats import DataError
from roll_opd.models.model_info import ModelFilesError
from roll_opd.objective.registry import AlgorithmError
from roll_opd.pipelines.checkpoints import CheckpointError
from roll_opd.rewards.interface import RewardError
from roll_opd.tracking.tracker_registry import TrackerError

# errors that the user can correct
REFUSALS = (
    AlgorithmError,
    CheckpointError,
    ConfigError,
    DataError,
    ModelFilesError,
    RewardError,
    TrackerError,
    WorkflowError,
)


def exit_code(
    error: BaseException, refusals: tuple[type[Exception], ...] = REFUSALS, *, is_started: bool = True
) -> int:
    """Print why a run has ended, and return the exit code.

    A traceback is printed only if the run has started; before the start, every error is printed as a sentence.

    Args:
        error: the exception that ended the run.
        refusals: types of the errors that the user can correct.
        is_started: whether the run has started.
    """
    if isinstance(error, Terminated):
        return _ended(str(error), TERMINATED)
    if isinstance(error, KeyboardInterrupt):
        return _ended(str(error) or "interrupted", INTERRUPTED)
    if isinstance(error, refusals):
        return _ended(str(error), USER_ERROR)
    if isinstance(error, RunError):
        return _ended(str(error), FAILED)
    if isinstance(error, OSError) and error.errno in FULL:
        hint = "free space or change output_dir, then use resume_from_checkpoint=true"
        return _ended(f"{reason(error)}; {hint}", USER_ERROR)
    if is_started:
        traceback.print_exception(error)
        return FAILED
    if isinstance(error, OSError):
        return _ended(os_sentence(error), USER_ERROR)
    print_unexpected(error)
    return FAILED


def _ended(message: str, code: int) -> int:
    echo(f"roll-opd: {shortened(message)}", sys.stderr)
    return code
