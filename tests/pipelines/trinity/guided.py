"""A workflow of Trinity-RFT; only its import is changed."""

from roll_opd.workflows import WORKFLOWS, Experience, ModelWrapper, Task, Workflow


@WORKFLOWS.register_module("guided_workflow")
class GuidedWorkflow(Workflow):
    """A question, answered as often as asked, and a reward for the right sum."""

    can_reset: bool = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list | None = None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task):
        self.question = task.raw_task.get("question")
        self.answer = task.raw_task.get("answer")
        self.rollout_args = task.rollout_args
        self.scale = task.workflow_args["scale"]

    def run(self) -> list[Experience]:
        responses = self.model.chat(
            [{"role": "user", "content": f"{self.question}"}],
            n=self.rollout_args.n,
            temperature=self.rollout_args.temperature,
        )
        made = []
        for response in responses:
            right = response.response_text.split()[-1:] == [self.answer]
            made.append(
                Experience(
                    tokens=response.tokens,
                    prompt_length=response.prompt_length,
                    reward=self.scale * float(right),
                    logprobs=response.logprobs,
                )
            )
        return made
