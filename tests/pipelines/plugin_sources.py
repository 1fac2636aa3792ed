"""Modules of a user for whole runs: environments, and workflows in Trinity-RFT's forms."""

GAMES = """
import os
import random
import time

from roll_opd.extras.games import ENVIRONMENTS, Environment


@ENVIRONMENTS.register("sums")
class Sums(Environment):
    # two sums, one after the other; worth 1 each where the last line is right
    def __init__(self, log=None):
        self.log = log

    def note(self, what):
        with open(self.log, "a") as file:
            file.write(what + "\\n")

    def reset(self, seed=None):
        self.seed, self.random, self.turn = seed, random.Random(seed), 0
        return self.asked(), {}

    def asked(self):
        self.numbers = self.random.randint(100, 999), self.random.randint(100, 999)
        return "{}+{}=".format(*self.numbers)

    def step(self, action):
        self.turn += 1
        right = action.split()[-1:] == [str(sum(self.numbers))]
        info = {"metrics": {"success": right, "action_is_valid": bool(action.strip())}}
        return self.asked(), float(right), self.turn == 2, False, info


@ENVIRONMENTS.register("faulty_sums")
class Faulty(Sums):
    # two games in five go wrong, each in its own way, for its seed says so; what goes wrong is written down
    def step(self, action):
        kind = ["raised", "raised", "timeout", "invalid", "invalid", *[""] * 15][self.random.randrange(20)]
        if kind:
            self.note(f"{kind}-{self.seed}")
        if kind == "timeout":
            time.sleep(3)
        if kind == "raised":
            raise self.random.choice([ValueError("the board is lost"), SystemExit("no more")])
        if kind == "invalid":
            return self.random.choice([("three", "values", "only"), (7, 1.0, False, False, {})])
        return super().step(action)


@ENVIRONMENTS.register("noted")
class Noted(Sums):
    # takes its time, and writes down each turn
    def step(self, action):
        time.sleep(0.05)
        self.note("turn")
        return super().step(action)


@ENVIRONMENTS.register("deadly")
class Deadly(Sums):
    # some games end their process, the first time that they are played
    def reset(self, seed=None):
        self.grave = f"{self.log}.{seed}"
        self.is_deadly = seed % 3 == 0 and not os.path.exists(self.grave)
        return super().reset(seed)

    def step(self, action):
        if self.is_deadly:
            open(self.grave, "w").close()
            os._exit(3)
        return super().step(action)
"""

GUIDE = """
import asyncio
from typing import List

import openai
from roll_opd.workflows import WORKFLOWS, Experience, ModelWrapper, OnPolicyDistillMathWorkflow, Task, Workflow
from roll_opd.workflows import WorkflowWithRecording


def exact(response: str, truth: str) -> float:
    return 1.0 if response.split()[-1:] == [truth] else 0.0


# as in the developer guide
@WORKFLOWS.register_module("documented")
class Documented(Workflow):
    def __init__(self, task: Task, model: ModelWrapper, auxiliary_models: List):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.question = task.raw_task.get("question")
        self.answer = task.raw_task.get("answer")
        self.rollout_args = task.rollout_args

    def run(self) -> List[Experience]:
        responses = self.model.chat(
            [{"role": "user", "content": self.question}],
            n=self.rollout_args.n,
            temperature=self.rollout_args.temperature,
        )
        return [
            Experience(
                tokens=response.tokens,
                prompt_length=response.prompt_length,
                reward=exact(response.response_text, self.answer),
                logprobs=response.logprobs,
            )
            for response in responses
        ]

    def resettable(self):
        return True

    def reset(self, task: Task):
        self.question = task.raw_task.get("question")
        self.answer = task.raw_task.get("answer")


# as in an older one: the task is not passed on, and one response is read as if it were no list
@WORKFLOWS.register_module("older")
class Older(Workflow):
    def __init__(self, model: ModelWrapper, task: Task, **kwargs):
        super().__init__(model, **kwargs)
        self.truth = task.raw_task["answer"]

    def run(self) -> List[Experience]:
        response = self.model.chat(
            [{"role": "user", "content": self.task.raw_task["question"]}], **{"temperature": 1.0, "max_tokens": 40}
        )
        reward = exact(response.response_text, self.truth)
        return [
            Experience(
                tokens=response.tokens,
                prompt_length=response.prompt_length,
                reward=reward,
                logprobs=response.logprobs,
            )
        ]


@WORKFLOWS.register_module("talk")
class Talk(Workflow):
    def run(self) -> List[Experience]:
        messages = [{"role": "user", "content": self.task.raw_task["question"]}]
        for other in ("12+34=", "56+78=", None):
            response = self.model.chat(messages, max_tokens=40)
            messages.append({"role": "assistant", "content": response.response_text})
            if other:
                messages.append({"role": "user", "content": other})
        made = self.model.convert_messages_to_experience(messages)
        made.reward = float(len(made.tokens) % 2)
        return [made]


@WORKFLOWS.register_module("taught")
class Taught(Workflow):
    is_async = True

    async def run_async(self) -> List[Experience]:
        (response,) = await self.model.chat_async([{"role": "user", "content": self.task.raw_task["question"]}])
        own = await self.model.logprobs_async(response.tokens)
        response.metrics["gap"] = float((own[response.prompt_length - 1 :] - response.logprobs).abs().max())
        response.info["teacher_logprobs"] = response.logprobs - 0.25
        return [response]


# a judge in engines of the run's own, asked in both ways
@WORKFLOWS.register_module("judged")
class Judged(Workflow):
    is_async = True
    can_reset = True

    def __init__(self, task, model, auxiliary_models):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = self.auxiliary_models[0]  # kept from one run to the next

    def reset(self, task):
        pass

    async def run_async(self) -> List[Experience]:
        question = [{"role": "user", "content": self.task.raw_task["question"]}]
        (response,) = await self.model.chat_async(question)
        (judge,) = self.auxiliary_model_wrappers
        (one,) = await judge.chat_async(question, temperature=0)
        completion = await self.client.chat.completions.create(
            model=self.client.model_path, messages=question, temperature=0
        )
        other = completion.choices[0].message.content
        assert one.response_text == other, (one.response_text, other)
        assert len(self.model.history) == 1 and not judge.history
        response.reward = exact(one.response_text, self.task.raw_task["answer"])
        return [response]


# unmodified OpenAI clients, of every kind: three turns, each with the log-probs of its answer
@WORKFLOWS.register_module("clients")
class Clients(Workflow):
    def run(self) -> List[Experience]:
        messages, received = [{"role": "user", "content": self.task.raw_task["question"]}], []
        options = {"model": "policy", "max_tokens": 12, "logprobs": True}
        for turn in range(3):
            kind = (self.model.tokenizer.encode(messages[0]["content"])[0] + turn) % 3
            options["messages"] = messages
            if kind == 0:
                done = self.model.get_openai_client().chat.completions.create(**options)
            elif kind == 1:
                done = asyncio.run(self.asked(options))
            else:
                done = self.model.get_openai_client().chat.completions.create(**options, stream=True)
            if kind == 2:
                pieces = [piece.choices[0] for piece in done]
                content = "".join(piece.delta.content or "" for piece in pieces)
                logprobs = pieces[-1].logprobs.content
            else:
                content, logprobs = done.choices[0].message.content, done.choices[0].logprobs.content
            received += [token.logprob for token in logprobs]
            messages += [
                {"role": "assistant", "content": content},
                {"role": "tool", "tool_call_id": "1", "content": "12+34="},
            ]
        made = self.model.branches()
        learned = sorted(float(x) for one in made for x in one.logprobs[one.action_mask])
        assert learned == sorted(received), "log-probs of clients and of training differ"
        for one in made:
            one.reward = float(len(one.tokens) % 2)
        return made

    async def asked(self, options):
        async with self.model.get_openai_async_client() as client:
            return await client.chat.completions.create(**options)


# subclasses of Trinity-RFT's own bases, by its pages: hooks that a base's run calls, and an agent that is recorded
class Asking(OnPolicyDistillMathWorkflow):
    def format_messages(self):
        return [{"role": "user", "content": self.task_desc}]


@WORKFLOWS.register_module("unrewarded")
class Unrewarded(Asking):
    def compute_reward(self, response):
        return None


@WORKFLOWS.register_module("rewarded")
class Rewarded(Asking):
    def compute_reward(self, response) -> float:
        accuracy = exact(response.response_text, self.truth)
        if response.metrics is None:
            response.metrics = {}
        response.metrics["accuracy"] = accuracy
        return accuracy


@WORKFLOWS.register_module("recorded")
class Recorded(WorkflowWithRecording):
    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key)

    async def run_async(self):
        asked = [{"role": "user", "content": self.task.raw_task["question"]}]
        done = await self.client.chat.completions.create(model=self.model_name, messages=asked)
        reward = exact(done.choices[0].message.content, self.task.raw_task["answer"])
        await self.update_reward(reward)
        return {"example/reward": reward}
"""
