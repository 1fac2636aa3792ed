"""The alarms of a run, with advice: which configuration keys to change. Only keys that have an effect are named."""

from collections.abc import Iterable, Mapping

from roll_opd.config.plan import RunPlan
from roll_opd.extras.alarm.divergence_alarm import DivergenceAlarm, Remedies
from roll_opd.pipelines.run_hooks import RunHook
from roll_opd.tracking.run_directory import RunDirectory

LENGTH_PENALTY = "length_penalty"


class AlarmOfRun(RunHook):
    """Warns of a run that degrades. A run without sampling has no alarm."""

    def __init__(self, plan: RunPlan, run: RunDirectory) -> None:
        super().__init__(plan, run)
        student = plan.student.model.path
        is_itself = any(teacher.source.location == student for teacher in plan.teachers)
        self._alarm = DivergenceAlarm(is_itself=is_itself, remedies=remedies(plan)) if plan.rollout else None

    def after_step(self, metrics: Mapping[str, float | None]) -> Iterable[str]:
        """Return new alarms."""
        return self._alarm.after(metrics) if self._alarm else ()


def remedies(plan: RunPlan) -> Remedies:
    """Return the advice for the alarms of a run with this plan."""
    return Remedies(slower=tuple(_slower(plan)), shorter=tuple(_shorter(plan)), fresher=tuple(_fresher(plan)))


def _slower(plan: RunPlan) -> list[str]:
    found = []
    if any(teacher.following for teacher in plan.teachers):
        found.append(
            "a teacher that changes less (follows_student.ema_decay nearer to 1, a larger"
            " follows_student.update_interval, or a frozen teacher)"
        )
    if any(teacher.context and teacher.context.hint for teacher in plan.teachers):
        found.append("a more detailed hint")
    if plan.mode != "pure":
        found.append(_reference(plan))
    return found


def _shorter(plan: RunPlan) -> list[str]:
    found = []
    if not plan.objective.max_len_mask:
        found.append("exclude truncated answers from the loss (max_len_mask: true)")
    if plan.mode != "pure":
        if plan.rewards and not any(term.worker == LENGTH_PENALTY for reward in plan.rewards for term in reward.terms):
            found.append(f"add a {LENGTH_PENALTY} to the reward")
        found.append(f"use {_reference(plan)}")
    return found


def _fresher(plan: RunPlan) -> list[str]:
    if plan.async_generation_ratio:
        return [f"lower async_generation_ratio ({plan.async_generation_ratio})"]
    return ["compare the settings of training and inference engine (dtype, router_replay)"]


def _reference(plan: RunPlan) -> str:
    if plan.objective.kl_loss_coef:
        return "a larger kl_loss_coef"
    return "a KL to the reference policy in the loss (use_kl_loss: true, kl_loss_coef above 0)"
