r"""`math_python`: mathematics questions answered in \boxed{}, optionally after running Python programs."""

import atexit
import math
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from roll_opd.base.failures import os_sentence
from roll_opd.data.row_files import open_file
from roll_opd.data.row_formats import BadRow, DataError, number_text
from roll_opd.extras.games.action_reader import SPECIAL_TOKENS
from roll_opd.extras.games.environment_interface import ENVIRONMENTS, Environment, EnvironmentFailure, Reset, Step
from roll_opd.extras.games.game import AGGREGATES, at_least, checked_seed, random_numbers
from roll_opd.extras.graders.mathematics.final_answer import boxed
from roll_opd.extras.graders.mathematics.processes import Busy
from roll_opd.extras.graders.rewards.code_sandbox import UNSAFE
from roll_opd.extras.graders.rewards.math_rule import equals
from roll_opd.extras.graders.sandbox.bubblewrap import CaseLimits, SandboxError
from roll_opd.extras.graders.sandbox.pool import SandboxPool
from roll_opd.extras.graders.sandbox.response import answer_of, program_of

OPEN, CLOSE = "<code>", "</code>"
FENCES = ("```py", "```Py")
NOTHING = "(the program printed nothing; print what you want to see)"
# errors go to stdout, as a sandboxed program has no stderr
WRAPPED = """\
import sys as _sys, traceback as _traceback
try:
    exec(compile({program!r}, "program.py", "exec"), {{**globals(), "__name__": "__main__"}})
except SystemExit:
    pass
except BaseException as _error:
    _sys.stdout.flush()
    _frames = _error.__traceback__ and _error.__traceback__.tb_next
    print("".join(_traceback.format_exception(type(_error), _error, _frames, limit=-8)), end="")
"""


def tool_program(response: str) -> str | None:
    """Return the program in a response, or None if the response has no program.

    The program is the text between the last <code> and </code> after the thought. Without these tags, the program is
    the last fenced Python block.
    """
    text = answer_of(response)
    before, marked, _ = text.rpartition(CLOSE)
    if marked and OPEN in before:
        inside = before.rpartition(OPEN)[2]
        return (program_of(inside) if "```" in inside else inside) or None
    return program_of(text) if any(fence in text for fence in FENCES) else None


class PythonTool:
    """Thread-safe runner of Python programs. Tools with equal limits share a pool with one process per CPU."""

    def __init__(self, seconds: float, unsafe: bool = False, most_characters: int = 4000) -> None:
        """Create a runner. Its processes start on first use.

        - `seconds`: CPU time of each program.
        - `unsafe`: whether programs run without a sandbox.
        - `most_characters`: largest number of characters of the output that are returned.
        """
        self._limits = CaseLimits(cpu_seconds=math.ceil(seconds), wall_seconds=2.0 * seconds)
        self._unsafe, self._most = unsafe, most_characters

    def run(self, program: str) -> str:
        """Return the output of a program. If the program was stopped, the output ends with the reason.

        Raises `EnvironmentFailure` if this machine has no sandbox.
        """
        try:
            with _STARTING:
                pool, places = _pool(self._limits, self._unsafe)
            with places:
                outcome = pool.outcome(WRAPPED.format(program=program))
        except SandboxError as error:
            raise EnvironmentFailure(f"python tool: {error}") from error
        if outcome is None:
            return "(the program broke its sandbox)"
        printed = outcome.stdout.decode("utf-8", "replace").strip()
        if len(printed) > self._most:
            half = self._most // 2
            printed = f"{printed[:half]}\n... ({len(printed) - 2 * half} characters left out)\n{printed[-half:]}"
        ended = f"(ended: {outcome.ended})" if outcome.exit_code is None or outcome.ended != "ended" else ""
        if not ended and outcome.exit_code:
            ended = "(ended: time limit)" if outcome.exit_code in (-9, -24) else f"(exit code {outcome.exit_code})"
        return "\n".join(filter(None, (printed, ended))) or NOTHING


_STARTING = threading.Lock()


@cache
def _pool(limits: CaseLimits, unsafe: bool) -> tuple[SandboxPool, threading.Semaphore]:
    """Return (pool, semaphore): this process's sandbox pool for these limits, and the semaphore of the pool."""
    if unsafe:
        print(UNSAFE, file=sys.stderr, flush=True)
    size = len(os.sched_getaffinity(0))
    pool = SandboxPool(limits, size, unsafe)
    atexit.register(pool.close)
    return pool, threading.Semaphore(size)


MODES = {**AGGREGATES, "raw_reward": "last", "tool_uses": "last"}
INSTRUCTION = (
    "Solve the problem, and give the final answer inside \\boxed{{}}. Before that you may run up to {uses} Python"
    " programs: write one in a block ```python, end your turn, and you are shown what it printed."
)


@ENVIRONMENTS.register("math_python")
@ENVIRONMENTS.register("roll_math")
@dataclass(eq=False)
class MathPython(Environment):
    """Mathematics with a Python tool.

    The reward is 1 for a right answer and 0 for a wrong answer. A response without an answer gets `format_penalty`.

    - `dataset_name`: a JSONL file with `question_key` and `answer_key` in each row.
    - `mode`: in mode "train", the seed draws a random row; in mode "val", the seed is the row number.
    - `max_tool_uses`: number of programs that the model may run in an episode. Each program runs in a sandbox for at
      most `tool_seconds`.
    - `unsafe`: whether programs run without a sandbox.
    """

    dataset_name: str
    question_key: str = "problem"
    answer_key: str = "answer"
    mode: Literal["train", "val"] = "train"
    max_tool_uses: int = 0
    max_steps: int | None = None
    format_penalty: float = 0.0
    tool_seconds: float = 5.0
    max_output_chars: int = 4000
    unsafe: bool = False
    env_instruction: str | None = None
    special_token_list: Sequence[str] | None = SPECIAL_TOKENS

    def __post_init__(self) -> None:
        """Check the arguments, and read the questions."""
        at_least("max_tool_uses", self.max_tool_uses, 0)
        at_least("max_output_chars", self.max_output_chars, 0)
        at_least("max_steps", 1 if self.max_steps is None else self.max_steps, 1)
        if not 0 < self.tool_seconds <= 3600:
            raise EnvironmentFailure(f"tool_seconds is {self.tool_seconds}; set seconds above 0, at most 3600")
        self._rows = questions(self.dataset_name, self.question_key, self.answer_key)
        own = INSTRUCTION.format(uses=self.max_tool_uses) if self.max_tool_uses else ""
        self._instruction = own if self.env_instruction is None else self.env_instruction
        self._tool = PythonTool(self.tool_seconds, self.unsafe, self.max_output_chars)
        self._next, self._turn, self._uses = 0, 0, 0
        self._answer: str | None = None  # None: no active episode

    def reset(self, seed: int | None = None) -> Reset:
        """Start an episode with a question. Without a seed, this is the next question of the file."""
        seed = checked_seed(seed)
        if seed is None:
            number, self._next = self._next, self._next + 1
        else:
            number = seed if self.mode == "val" else int(random_numbers(seed).integers(len(self._rows)))
        question, self._answer = self._rows[number % len(self._rows)]
        self._turn = self._uses = 0
        return question, {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        """Run the program in a response. If there is no program, grade the answer and end the episode.

        Programs beyond `max_tool_uses` are not run.
        """
        if self._answer is None:
            raise EnvironmentFailure("math_python: no episode is active; call reset")
        self._turn += 1
        response = action if isinstance(action, str) else ""
        for token in self.special_token_list or ():
            response = response.replace(token, "")
        program = tool_program(response) if self._uses < self.max_tool_uses else None
        if program is not None:
            self._uses += 1
            truncated = self.max_steps is not None and self._turn >= self.max_steps
            self._answer = None if truncated else self._answer
            info = {**self._info(True, False, 0.0, "a program was run"), "use_tool": True}
            return self._tool.run(program), 0.0, False, truncated, info
        answer = boxed(answer_of(response))
        right = answer is not None and _is_right(answer, self._answer)
        self._answer = None
        outcome = "there was no answer" if answer is None else f"the answer was {answer}"
        info = self._info(answer is not None, right, 0.0 if answer is not None else float(self.format_penalty), outcome)
        return "", float(right) + info["metrics"]["format_penalty"], True, False, info

    def _info(self, valid: bool, right: bool, penalty: float, outcome: str) -> dict[str, Any]:
        metrics = {
            "success": right,
            "action_is_valid": valid,
            "action_is_effective": valid,
            "format_penalty": penalty,
            "raw_reward": float(right),
            "tool_uses": self._uses,
        }
        description = f"Turn {self._turn}: {outcome}."
        return {"metrics": metrics, "metrics_agg_mode": dict(MODES), "action_desc": description, "use_tool": False}


def questions(file: str, question_key: str, answer_key: str) -> Sequence[tuple[str, str]]:
    """Return (question, answer) of each row of a file.

    Raises `EnvironmentFailure` if a row is incomplete. The message names the line.
    """
    if not Path(file).is_file():
        raise EnvironmentFailure(f"dataset_name {file}: file not found; set a JSONL file (datasets are not downloaded)")
    stamp = Path(file).stat()
    return _read(file, question_key, answer_key, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=16)
def _read(file: str, question_key: str, answer_key: str, *version: int) -> Sequence[tuple[str, str]]:
    """Return the rows of a file. A process reads the file once, and reads it again if the file has changed."""
    rows = []
    try:
        for number, _, row in open_file(file).scan():
            rows.append(_row(row, question_key, answer_key, f"{file}:{number}"))
    except OSError as error:
        raise EnvironmentFailure(f"dataset_name: {os_sentence(error)}") from error
    except DataError as error:
        raise EnvironmentFailure(f"dataset_name: {error}") from error
    if not rows:
        raise EnvironmentFailure(f"dataset_name {file}: has no rows; set a file with at least one row")
    return tuple(rows)


def _row(row: Any, question_key: str, answer_key: str, where: str) -> tuple[str, str]:
    if isinstance(row, BadRow):
        raise EnvironmentFailure(f"{where}: is {row.kind} ({row.detail}); write one object per line")
    keys = list(row) if isinstance(row, dict) else []
    for key, name in ((question_key, "question_key"), (answer_key, "answer_key")):
        if key not in keys or not isinstance(row[key], str | int | float):
            raise EnvironmentFailure(f"{where}: has no text under {key!r}, only {keys}; correct the row or {name}")
    question, answer = (
        row[key] if isinstance(row[key], str) else number_text(row[key]) for key in (question_key, answer_key)
    )
    return question, answer


def _is_right(answer: str, truth: str) -> bool:
    try:
        return equals(answer, truth)
    except Busy as error:
        raise EnvironmentFailure("math_python: too many slow comparisons of answers; run fewer episodes") from error
