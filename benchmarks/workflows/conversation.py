"""A conversation of some turns with somebody who answers at once."""

from roll_opd.workflows import WORKFLOWS, Experience, Task, Workflow


@WORKFLOWS.register_module("conversation")
class Conversation(Workflow):
    """Asks for one sum after another; `workflow_args.turns` of them."""

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
