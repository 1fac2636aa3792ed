"""The base of workflows whose conversation, several turns long, is one experience."""

from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.workflows.interface import Workflow
from roll_opd.workflows.workflow_experience import Experience


class MultiTurnWorkflow(Workflow):
    """Talks with the model, and makes one experience of the messages; what others said in between is not learned.

    One call makes one run at a task, as in Trinity-RFT. A subclass whose call makes all of them says so with
    `can_repeat = True` and gives each experience its `eid.run`.
    """

    def process_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float | None,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return a conversation that this run has had as one experience; numbers of `info` are its metrics.

        ValueError where this run has had no such conversation.
        """
        return self._described(self.model.convert_messages_to_experience(messages), reward, info, truncate_status)

    async def process_messages_to_experience_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float | None,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return what `process_messages_to_experience` does."""
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
