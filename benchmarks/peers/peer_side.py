"""Code that both peers share: reading the work, the optimizer, greedy answers, and rows of figures."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Work = dict[str, Any]


def read_work(path: str) -> Work:
    """Return the work that `works.py` has written."""
    return json.loads(Path(path).read_text())


def optimizer_of(work: Work, model: Any) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Return AdamW with a learning rate that rises to its peak during the warm-up and then falls to 0."""
    warmup, total = work["warmup_steps"], work["total_steps"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=work["learning_rate"],
        betas=tuple(work["betas"]),
        eps=work["epsilon"],
        weight_decay=work["weight_decay"],
    )

    def rate(done: int) -> float:
        update = done + 1  # counted from 1, so that the first update has a rate above 0
        return update / warmup if update <= warmup else (total - update) / (total - warmup)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


@torch.no_grad()
def greedy_answers(work: Work, model: Any, tokenizer: Any) -> list[str]:
    """Return the answers to the held-out prompts, which all have the same length."""
    prompts_BP = torch.tensor(work["held_out"])
    tokens_BT = model.generate(
        prompts_BP,
        attention_mask=torch.ones_like(prompts_BP),
        do_sample=False,
        max_new_tokens=work["max_new_tokens"],
    )
    return tokenizer.batch_decode(tokens_BT[:, prompts_BP.shape[1] :], skip_special_tokens=True)


class Rows:
    """Writes one line per step with the seconds of each `part`; validation is not part of a step."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def write(self, step: int, **figures: Any) -> None:
        """Write the row of the step that has ended, and start the next step."""
        whole = time.perf_counter() - self._began - self._seconds.pop("validate", 0.0)
        row = {"step": step, "seconds": whole, "parts": self._seconds, "peak_gib": peak_gib(), **figures}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._seconds, self._began = {}, time.perf_counter()


def peak_gib() -> float:
    """Return the peak resident memory of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 2**20
