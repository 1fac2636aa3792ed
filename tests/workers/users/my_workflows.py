"""Workflows of users, correct and faulty. None of them calls the student."""

import asyncio
import os
import time

from roll_opd.workflows import WORKFLOWS, Experience, Task, Workflow

made = 0  # instances in this process


def answer(task: Task, reward: float | None = 0.5, **more) -> Experience:
    number = task.raw_task["number"]
    return Experience(tokens=[1, 2, 3, number], prompt_length=2, logprobs=[-0.5, -1.5], reward=reward, **more)


@WORKFLOWS.register_module("plain")
class Plain(Workflow):
    def run(self) -> list[Experience]:
        return [answer(self.task, metrics={"place": place}) for place in range(self.task.raw_task["number"] % 3)]


class Awaited(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        await asyncio.sleep(0.2)
        return [answer(self.task)]


class Heavy(Workflow):
    """Returns how often it was constructed; it has an older flag, and a constructor that does not pass the task on."""

    def __init__(self, task: Task, model, **kwargs) -> None:
        super().__init__(model, **kwargs)
        global made
        made += 1

    def resettable(self) -> bool:
        return True

    def reset(self, task: Task) -> None:
        pass

    def run(self) -> list[Experience]:
        time.sleep(0.005)
        return [answer(self.task, reward=float(made))]


class Repeated(Workflow):
    can_reset = can_repeat = True

    def reset(self, task: Task) -> None:
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def run(self) -> list[Experience]:
        experiences = []
        for run in range(self.repeat_times):
            experiences.append(answer(self.task, reward=float(os.getpid())))
            experiences[-1].eid.run = self.run_id_base + run
        return experiences


class Panic(BaseException):
    """No Exception."""


class FaultyLoop(Workflow):
    """Executes on its event loop the fault that the row names."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        what = self.task.raw_task.get("what")
        await asyncio.sleep(0.02)
        if what == "lost":  # waits for what it has cancelled itself
            task = asyncio.create_task(asyncio.sleep(10))
            await asyncio.sleep(0)
            task.cancel()
            await task
        if what == "leaving":
            await asyncio.gather(self.leave(), asyncio.sleep(0.01))
        if what == "panic":
            raise Panic("of a library in another language")
        return [answer(self.task)]

    async def leave(self) -> None:
        raise SystemExit(4)


class Forgetful(Repeated):
    """Returns only as many of its runs as the row specifies."""

    def run(self) -> list[Experience]:
        return super().run()[: self.task.raw_task["made"]]


class Alone(Workflow):
    """Returns its models other than the student."""

    def __init__(self, task: Task, model, auxiliary_models, auxiliary_model_wrappers) -> None:
        super().__init__(model=model, task=task, auxiliary_models=auxiliary_models)
        self.given = (auxiliary_models, auxiliary_model_wrappers)

    def run(self) -> list[Experience]:
        found = [*self.given, self.auxiliary_models, self.auxiliary_model_wrappers]
        return [answer(self.task, reward=float(sum(one is None for one in found)))]


class Faulty(Plain):
    """Executes on its process the fault that the row names."""

    def run(self) -> list[Experience]:
        what = self.task.raw_task.get("what")
        if what == "raise":
            raise ValueError("no idea")
        if what == "hang":
            time.sleep(1000)
        if what == "exit":
            os._exit(3)
        if what == "leave":
            raise SystemExit(4)
        if what == "leak":
            self.kept = bytearray(2**30)
            self.kept[::4096] = b"x" * len(self.kept[::4096])
            time.sleep(20)
        if what == "panic":
            raise Panic("of a library in another language")
        twice = answer(self.task)
        nonsense = {
            "none": None,
            "twice": [twice, twice],
            "taught": [answer(self.task, info={"teacher_logprobs": [-1.0, float("nan")]})],
            "text": "an answer",
            "number": [3],
            "short": [Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=[-1.0])],
            "nan": [answer(self.task, reward=float("nan"))],
            "prompt": [Experience(tokens=[1, 2], prompt_length=3, logprobs=[])],
            "unsampled": [Experience(tokens=[1, 2], prompt_length=1)],
            "foreign": [Experience(tokens=[1, 10**6], prompt_length=1, logprobs=[-1.0])],
            "negative": [Experience(tokens=[-1, 1], prompt_length=1, logprobs=[-1.0])],
            "endless": [Experience(tokens=[1] * 65, prompt_length=1, logprobs=[-1.0] * 64)],
            "infinite": [Experience(tokens=[1, 2], prompt_length=1, logprobs=[float("-inf")])],
            "floats": [Experience(tokens=[1.5, 2.0], prompt_length=1, logprobs=[-1.0])],
        }
        if what in nonsense:
            return nonsense[what]
        time.sleep(0.05)
        return [answer(self.task)]


class Judged(Workflow):
    """Requests the reward of the answer from a model on a server."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        (judge,) = self.auxiliary_models
        question = [{"role": "user", "content": str(self.task.raw_task["number"])}]
        if self.task.raw_task["number"] % 2:
            (verdict,) = await self.auxiliary_model_wrappers[0].chat_async(question)
            return [answer(self.task, reward=float(verdict.response_text))]
        verdict = await judge.chat.completions.create(model=judge.model_path, messages=question)
        return [answer(self.task, reward=float(verdict.choices[0].message.content))]


class Waits(Workflow):
    """Has a separate time limit, as the row specifies."""

    @property
    def is_async(self) -> bool:
        return bool(self.task.raw_task["number"] % 2)

    def run(self) -> list[Experience]:
        if self.task.raw_task["number"] == 2:
            return [answer(self.task)]
        raise TimeoutError("its own")

    async def run_async(self) -> list[Experience]:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(10)
        return []
