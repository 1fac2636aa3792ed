"""Limits on groups that fail or are rejected. Beyond them, the run ends before it draws further prompts."""

from collections.abc import Iterable, Sequence

from roll_opd.base.failures import RunError
from roll_opd.rollout.finished_groups import FinishedGroup

# the run ends if the groups rejected for one batch are more than MAX_REJECTED times the groups of a batch, and more
# than MIN_REJECTED
MAX_REJECTED = 20
MIN_REJECTED = 1000


def check_failed(groups: Iterable[FinishedGroup], wanted: int, n: int, min_fraction: float) -> None:
    """Raise RunError if so many runs have failed that the next batch cannot reach `min_fraction`.

    The next batch will list all groups up to the last one that it needs. Its groups that have not ended yet count as if
    none of their runs fails.

    Args:
        groups: finished groups that are in no batch, in the order of their draws.
        wanted: number of groups in a batch.
        n: number of runs per group.
        min_fraction: smallest fraction of a batch's runs that must not fail.
    """
    kept = replaced = failed = 0
    for group in groups:
        if kept == wanted:
            break
        kept += group.passed
        replaced += not group.passed and group.failed_runs > 0
        failed += group.failed_runs
    check_failed_rate(failed / (n * (wanted + replaced)), min_fraction)


def check_rejected(groups: Sequence[FinishedGroup], wanted: int, is_filtered: bool) -> None:
    """Raise RunError if too many groups were rejected for one batch.

    Args:
        groups: finished groups that are in no batch.
        wanted: number of groups in a batch.
        is_filtered: whether a filter may reject groups.
    """
    kept = sum(group.passed for group in groups)
    rejected = len(groups) - kept
    if kept >= wanted or rejected <= max(MAX_REJECTED * wanted, MIN_REJECTED):
        return
    if failed := sum(not group.passed and group.failed_runs > 0 for group in groups):
        raise RunError(
            f"runs or rewards of {failed} prompts failed, filters rejected {rejected - failed} prompts, and only"
            f" {kept} prompts were kept, but a step needs {wanted}; see the warnings above, correct the workflow or"
            " the reward, and resume"
        )
    if not is_filtered:
        raise RunError(
            f"the workflow returned no sample for {rejected} prompts in a step of {wanted} prompts; correct the"
            " workflow (an agent that never calls the model returns no sample), or use other prompts"
        )
    raise RunError(
        f"the filters rejected the samples of {rejected} prompts and kept the samples of {kept} prompts, but a"
        f" step needs {wanted} prompts; loosen query_filter_config or response_filter_config, use other prompts,"
        " or correct a workflow or a reward"
    )


def check_failed_rate(failed_rate: float, min_fraction: float) -> None:
    """Raise RunError if less than `min_fraction` of a step's runs are left after failures."""
    if 1 - failed_rate < min_fraction:
        raise RunError(
            f"at most {1 - failed_rate:.0%} of the runs of a step are left after failures, less than min_batch_fraction"
            f" {min_fraction:g}; see the warnings above, correct the workflow or the reward, and resume"
        )
