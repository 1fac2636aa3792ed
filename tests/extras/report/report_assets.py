"""Run directories for reports, in the form that runs write, small or with 5,000 steps; and a reader of the page."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from roll_opd.tracking.run_directory import METRICS, SAMPLES, VALIDATION_SAMPLES, RunDirectory

CONFIG = "exp_name: demo\nmax_steps: {steps}\nopd_kl_coef: 1.0\n"
PHASES = {"generate": 2.0, "teacher": 0.5, "train": 1.0, "other": 0.1}


class Page(HTMLParser):
    """The markup as a browser parses it: elements, and the text inside each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.comments: list[str] = []
        self.text: dict[str, str] = {}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = "data" if ("id", "data") in attrs else tag
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text[self._open] = self.text.get(self._open, "") + data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.text["data"].strip(), parse_constant=lambda name: pytest_fail(name))


def pytest_fail(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def metrics_row(step: int, steps: int) -> dict[str, float]:
    """Return row `step` of a pure run whose reverse KL falls with noise."""
    seconds = {f"time/{name}": value for name, value in PHASES.items()}
    noise = math.sin(step * 12.9898) * 0.1
    return {
        "step": step,
        "opd/reverse_kl/mean": 1.0 - 0.9 * step / steps + noise,
        "opd/student_logprob": -0.3 + noise,
        "critic/score/mean": step / steps,
        "tokens/response_length/mean": 30.0 + noise,
        "actor/grad_norm": 1.0 + noise,
        "actor/clipfrac": 0.0,
        "actor/kl_loss": 0.0,
        "rollout/generated_tokens": 1000.0,
        "time/step": sum(PHASES.values()),
        **seconds,
    }


def sample_row(step: int, number: int, response: str = "4+5=9 ok", **more: Any) -> dict[str, Any]:
    """Return a sample whose tokens are the characters of its response."""
    rng = np.random.default_rng([step, number])
    length = len(response)
    student = -rng.exponential(0.3, length).astype(np.float32)
    teacher = -rng.exponential(0.3, length).astype(np.float32)
    return {
        "step": step,
        "id": f"train-{number}#{step}/0",
        "tag": "math_rule",
        "prompt": "<|user|>4+5=<|end|>",
        "response": response,
        "token_ends": list(range(1, length + 1)),
        "ground_truth": "9",
        "reward": float(number % 2),
        "reward_reason": "right" if number % 2 else "wrong",
        "finish_reason": "stop",
        "versions": [[step - 1, length]],
        "tokens": [7, 8, *(ord(character) % 256 for character in response)],
        "prompt_length": 2,
        "action_mask": [True] * length,
        "rollout_logprobs": student,
        "student_logprobs": student,
        "teacher_logprobs": {"teacher": teacher},
        "ref_logprobs": None,
        "advantages": teacher - student,
        "loss_mask": None,
        **more,
    }


def write_run(path: Path, steps: int = 6, response: str = "4+5=9 ok", **more: Any) -> RunDirectory:
    """Write a whole pure run of `steps` steps; `more` are keys of its samples."""
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.write_config(CONFIG.format(steps=steps))
    first = {"step": 0, "val_correct/all/mean": 0.125, "val_correct/teacher/mean": 1.0, "time/startup": 12.5}
    rows = [first, *(metrics_row(step, steps) for step in range(1, steps + 1))]
    rows[-1]["val_correct/all/mean"] = 0.875
    run.append_jsonl(METRICS, rows)
    run.append_jsonl(SAMPLES, [sample_row(step, n, response, **more) for step in range(1, steps + 1) for n in range(4)])
    for step in (0, steps):
        answers = [{**sample_row(step, n, response), "id": f"val-{n}#{step + n}/0", "by": "student"} for n in range(2)]
        run.append_jsonl(VALIDATION_SAMPLES, answers)
    run.append_jsonl(VALIDATION_SAMPLES, [{**sample_row(0, 0), "id": "val-0#5/0", "by": "teacher/big"}])
    summary = {"steps": steps, "seed": 1, "versions": {"torch": "2.0"}}
    run.summary_file.write_text(json.dumps(summary), encoding="utf-8")
    return run
