"""`MultiTurnWorkflow`: base of workflows that return a whole conversation as one experience."""

from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.workflows.interface import Workflow
from roll_opd.workflows.workflow_experience import Experience


class MultiTurnWorkflow(Workflow):
    """Base class: convert a multi-turn conversation to one experience; only the model's turns are trained on.

    One call makes one run of a task, as in Trinity-RFT. A subclass whose call makes all runs sets `can_repeat = True`
    and the `eid.run` of each experience.
    """

    def process_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float | None,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return a conversation of this run as one experience; numbers in `info` become its metrics.

        Raises ValueError if this run has no such conversation.
        """
        return self._described(self.model.convert_messages_to_experience(messages), reward, info, truncate_status)

    async def process_messages_to_experience_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float | None,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Async form of `process_messages_to_experience`."""
        made = await self.model.convert_messages_to_experience_async(messages)
        return self._described(made, reward, info, truncate_status)

    def _described(
        self, made: Experience, reward: float | None, info: Mapping[str, Any] | None, truncate_status: str | None
    ) -> Experience:
        made.reward = reward
        made.truncate_status = made.truncate_status or truncate_status
        made.info.update(info or {})
        numbers = {name: value for name, value in (info or {}).items() if isinstance(value, int | float)}
        made.metrics.update({name: float(value) for name, value in numbers.items()})
        return made
