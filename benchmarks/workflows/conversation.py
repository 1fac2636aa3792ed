"""A conversation of several turns with a user who answers immediately."""

from roll_opd.workflows import WORKFLOWS, Experience, Task, Workflow


@WORKFLOWS.register_module("conversation")
class Conversation(Workflow):
    """Requests one sum after another, in `workflow_args.turns` turns."""

    is_async = can_reset = True

    def reset(self, task: Task) -> None:
        """Take the next row."""

    async def run_async(self) -> list[Experience]:
        """Return the conversation."""
        messages = [dict(message) for message in self.task.raw_task["messages"]]
        for _ in range(self.task.workflow_args["turns"]):
            (answer,) = await self.model.chat_async(messages)
            messages += [{"role": "assistant", "content": answer.response_text}, messages[0]]
        return self.model.branches()
