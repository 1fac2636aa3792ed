"""`agent_workflow`: run an agent that uses an OpenAI client, and train on the responses to its requests.

The agent is a function or a command.
"""

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
from roll_opd.workflows.workflow_experience import Experience, WorkflowError
from roll_opd.workflows.workflow_interface import WORKFLOWS, Workflow

KINDS = BRANCH, _ = "branch", "call"  # one experience per conversation branch, or per request
OUTPUT_TAIL_BYTES = 4000  # bytes of a command's stdout or stderr that are kept


@WORKFLOWS.register_module("agent_workflow", arguments=("agent", "command", "experiences"))
class AgentWorkflow(Workflow):
    """Run an agent on a row, and train on the responses to its requests.

    The agent sends its requests to the policy's endpoint. `workflow_args` has either `agent` or `command`:

    - `agent`: the dotted path of a function or coroutine function. It gets (row, base_url, api_key) and returns the
      reward or None.
    - `command`: the argument list of a process. {base_url} and {api_key} in the arguments are replaced. The process
      gets the row as JSON on stdin, the address in OPENAI_BASE_URL and the key in OPENAI_API_KEY. The last line of its
      output may be the reward, as a number or as JSON with `reward` and `metrics`.

    `workflow_args` may also have `experiences`. With `branch` (the default), each conversation becomes one experience.
    With `call`, each request becomes one experience.

    The agent may also post its reward (`POST {base_url}/reward`). If there is no reward from the agent, the rewards of
    the configuration score the experiences.
    """

    @staticmethod
    def check_arguments(arguments: Mapping[str, Any]) -> None:
        """Check `workflow_args`.

        Raises WorkflowError if the arguments are not valid, or if the agent function does not take three arguments.
        """
        try:
            agent, _ = _agent(arguments)
        except (ValueError, ImportError) as error:
            raise WorkflowError(f"workflow_args: {error}") from error
        if agent is not None:
            try:
                inspect.signature(agent).bind({}, "", "")
            except TypeError as error:
                raise WorkflowError(
                    f"workflow_args.agent: {arguments['agent']} must take (row, base_url, api_key): {error}"
                ) from None
            except ValueError:  # a function written in C has no signature
                pass

    @property
    def is_async(self) -> bool:  # type: ignore[override]  # a plain function runs in the thread of `run`
        """Whether the agent is a coroutine function or a command."""
        agent, _ = _agent(self.task.workflow_args)
        return agent is None or inspect.iscoroutinefunction(agent)

    def run(self) -> list[Experience]:
        """Run the agent function. Return the experiences made from its requests."""
        agent, _ = _agent(self.task.workflow_args)
        assert agent is not None
        return self._experiences(_reward(agent(self.task.raw_task, self.model.base_url, self.model.api_key)))

    async def run_async(self) -> list[Experience]:
        """Run the coroutine function or the command. Return the experiences made from its requests."""
        agent, command = _agent(self.task.workflow_args)
        if agent is None:
            return self._experiences(await self._run_command(command))
        return self._experiences(_reward(await agent(self.task.raw_task, self.model.base_url, self.model.api_key)))

    def _experiences(self, reward: float | None) -> list[Experience]:
        by_branch = self.task.workflow_args.get("experiences", BRANCH) == BRANCH
        made = self.model.branches() if by_branch else self.model.extract_experience_from_history()
        for experience in made:
            experience.reward = reward
        return made

    async def _run_command(self, command: Sequence[str]) -> float | None:
        url, key = self.model.base_url, self.model.api_key
        words = [word.replace("{base_url}", url).replace("{api_key}", key) for word in command]
        environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        host = urlsplit(url).hostname or ""
        for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach this host and must not see the key
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
                _kill_group(process)
            if code:
                raise RuntimeError(f"{' '.join(command)} ended with exit code {code}: {_tail(errors)}")
            return self._parse_reward(_tail(output))

    def _parse_reward(self, output: str) -> float | None:
        """Return the reward in the last line of a command's output.

        If the last line has no reward, the reward that the command has posted is returned. Metrics in the last line are
        recorded. Raises ValueError for a malformed reward.
        """
        *_, last = ["", *output.splitlines()]
        parsed = None
        with contextlib.suppress(ValueError, RecursionError):  # the line is not a reward
            parsed = json.loads(last)
        if isinstance(parsed, int | float) or (isinstance(parsed, dict) and "reward" in parsed):
            self.model.take_reward(last)
        return self.model.reward


def _agent(arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return (function, []) for an agent function, or (None, command) for a command.

    Raises ValueError or ImportError if the arguments are not valid.
    """
    given = dict(arguments)
    path, command, kind = given.pop("agent", None), given.pop("command", None), given.pop("experiences", BRANCH)
    is_list = isinstance(command, list | tuple) and len(command) > 0
    if given or (isinstance(path, str), is_list) not in ((True, False), (False, True)) or kind not in KINDS:
        raise ValueError(
            f"workflow_args of agent_workflow are {dict(arguments)}; expected agent (a dotted path)"
            f" or command (a list of strings), optionally experiences: {' or '.join(KINDS)}"
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
        raise TypeError(f"the agent returned {value!r}, expected a reward (a number) or None")
    return float(value)


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a command and all processes of its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(file: IO[bytes]) -> str:
    """Return the end of a command's output."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_TAIL_BYTES))
    return file.read().decode(errors="replace").strip()
