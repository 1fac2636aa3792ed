"""An agent that knows an OpenAI address and nothing else, as a workflow."""

import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import IO, Any

from roll_opd.extensions import users_module
from roll_opd.workflows.experience import Experience
from roll_opd.workflows.interface import WORKFLOWS, Workflow

TOLD = 4000  # bytes at the end of what a command writes that are read


@WORKFLOWS.register_module("agent_workflow")
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

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Return what the agent's requests made."""
        arguments = dict(self.task.workflow_args)
        agent, command = arguments.pop("agent", None), arguments.pop("command", None)
        kind = arguments.pop("experiences", "branch")
        if arguments or (agent is None) == (command is None) or kind not in ("branch", "call"):
            raise ValueError(
                f"workflow_args of agent_workflow are {self.task.workflow_args}; expected agent (a dotted path) or"
                " command (a list of words), and maybe experiences: branch or call"
            )
        reward = await (self._called(agent) if agent else self._started(command))
        made = self.model.branches() if kind == "branch" else self.model.extract_experience_from_history()
        for experience in made:
            experience.reward = reward
        return made

    async def _called(self, path: str) -> float | None:
        module, _, name = path.rpartition(".")
        function = getattr(users_module(module), name)
        given = self.task.raw_task, self.model.base_url, self.model.api_key
        if inspect.iscoroutinefunction(function):
            return _reward(await function(*given))
        return _reward(await asyncio.to_thread(function, *given))

    async def _started(self, command: Sequence[str]) -> float | None:
        url, key = self.model.base_url, self.model.api_key
        words = [word.replace("{base_url}", url).replace("{api_key}", key) for word in command]
        environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
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
        """Return the reward that a command's last line is, or that it has posted; metrics are noted."""
        with contextlib.suppress(ValueError, IndexError):  # it says something else
            self.model.take_reward(output.splitlines()[-1])
        return self.model.reward


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
