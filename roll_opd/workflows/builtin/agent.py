"""An agent that knows an OpenAI address and nothing else, as a workflow."""

import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import urlsplit

from roll_opd.base.user_modules import users_module
from roll_opd.workflows.interface import WORKFLOWS, Workflow
from roll_opd.workflows.workflow_errors import WorkflowError
from roll_opd.workflows.workflow_experience import Experience

KINDS = BRANCH, _ = "branch", "call"  # what an experience is of
TOLD = 4000  # bytes at the end of what a command writes that are read


@WORKFLOWS.register_module("agent_workflow", arguments=("agent", "command", "experiences"))
class AgentWorkflow(Workflow):
    """Runs an agent on a row, and learns from what it asked at the address that it was given.

    `workflow_args` has either

    - `agent`: the dotted path of a function (row, base_url, api_key), or of a coroutine function; what it returns is
      the reward, or None;
    - `command`: a list of words to start, in which {base_url} and {api_key} are replaced. The row is on its standard
      input as JSON, the address in OPENAI_BASE_URL and OPENAI_API_KEY; the last line that it writes may be the reward,
      a number or JSON with `reward` and `metrics`.

    and may have `experiences`: `branch`, one a conversation (the default), or `call`, one a request.
    A reward may be posted, too (`POST {base_url}/reward`); without any, the configuration's rewards score.
    """

    @staticmethod
    def check_arguments(arguments: Mapping[str, Any]) -> None:
        """Check `workflow_args`; raises WorkflowError for an agent that cannot be called with three arguments."""
        try:
            agent, _ = _agent(arguments)
        except (ValueError, ImportError) as error:
            raise WorkflowError(f"workflow_args: {error}") from error
        if agent is not None:
            try:
                inspect.signature(agent).bind({}, "", "")
            except TypeError as error:
                raise WorkflowError(
                    f"workflow_args.agent: {arguments['agent']} is called with row, base_url and api_key: {error}"
                ) from None
            except ValueError:  # written in C
                pass

    @property
    def is_async(self) -> bool:  # type: ignore[override]  # a plain function has the thread of `run`
        """Whether the agent is awaited."""
        agent, _ = _agent(self.task.workflow_args)
        return agent is None or inspect.iscoroutinefunction(agent)

    def run(self) -> list[Experience]:
        """Return what the requests of a plain function made."""
        agent, _ = _agent(self.task.workflow_args)
        assert agent is not None
        return self._made(_reward(agent(self.task.raw_task, self.model.base_url, self.model.api_key)))

    async def run_async(self) -> list[Experience]:
        """Return what the requests of a coroutine function or a command made."""
        agent, command = _agent(self.task.workflow_args)
        if agent is None:
            return self._made(await self._started(command))
        return self._made(_reward(await agent(self.task.raw_task, self.model.base_url, self.model.api_key)))

    def _made(self, reward: float | None) -> list[Experience]:
        by_branch = self.task.workflow_args.get("experiences", BRANCH) == BRANCH
        made = self.model.branches() if by_branch else self.model.extract_experience_from_history()
        for experience in made:
            experience.reward = reward
        return made

    async def _started(self, command: Sequence[str]) -> float | None:
        url, key = self.model.base_url, self.model.api_key
        words = [word.replace("{base_url}", url).replace("{api_key}", key) for word in command]
        environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        host = urlsplit(url).hostname or ""
        for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach it, and is not to have the key
            environment[name] = ",".join(filter(None, [os.environ.get(name), host]))
        with TemporaryFile() as row, TemporaryFile() as output, TemporaryFile() as errors:
            row.write(json.dumps(self.task.raw_task, default=str).encode())
            row.seek(0)
            process = await asyncio.create_subprocess_exec(
                *words, stdin=row, stdout=output, stderr=errors, env=environment, start_new_session=True
            )
            try:
                code = await process.wait()
            finally:
                _end(process)
            if code:
                raise RuntimeError(f"{' '.join(command)} ended with exit code {code}: {_end_of(errors)}")
            return self._said(_end_of(output))

    def _said(self, output: str) -> float | None:
        """Return the reward that a command's last line is, or that it has posted; metrics are noted.

        ValueError for a line that is meant as a reward, and is none.
        """
        *_, last = ["", *output.splitlines()]
        said = None
        with contextlib.suppress(ValueError, RecursionError):  # it says something else
            said = json.loads(last)
        if isinstance(said, int | float) or (isinstance(said, dict) and "reward" in said):
            self.model.take_reward(last)
        return self.model.reward


def _agent(arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return (function, []) or (None, command) from `workflow_args`; raises ValueError or ImportError."""
    given = dict(arguments)
    path, command, kind = given.pop("agent", None), given.pop("command", None), given.pop("experiences", BRANCH)
    is_list = isinstance(command, list | tuple) and len(command) > 0
    if given or (isinstance(path, str), is_list) not in ((True, False), (False, True)) or kind not in KINDS:
        raise ValueError(
            f"workflow_args of agent_workflow are {dict(arguments)}; expected agent (a dotted path)"
            f" or command (a list of words), optionally experiences: {' or '.join(KINDS)}"
        )
    if not isinstance(path, str):
        return None, [str(word) for word in command]
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"agent {path!r} is not a dotted path; write module.function, or path/to/file.py:function")
    agent = getattr(users_module(module), name, None)
    if not callable(agent):
        raise ValueError(f"agent {path}: {module} has no function named {name}; correct the name")
    return agent, []


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"the agent returned {value!r}, expected its reward, a number, or None")
    return float(value)


def _end(process: asyncio.subprocess.Process) -> None:
    """End a command and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_of(file: IO[bytes]) -> str:
    """Return the last characters of what was written."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TOLD))
    return file.read().decode(errors="replace").strip()
