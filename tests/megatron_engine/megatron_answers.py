"""Results of the Megatron workers for tests: a job is executed when the first test requests it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_registry import assemble_jobs
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("megatron_worker.py")
REPOSITORY = Path(__file__).parents[2]
SHOWN = 6000  # characters of the log of a worker that failed


class Workers:
    """Four ranks in separate processes, because importing Megatron's engine patches torch on a CPU."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "workers.log"
        self.process: subprocess.Popen | None = None
        self.is_asked = False

    def do(self, job: dict[str, Any]) -> str | None:
        """Execute a job; return None, or the reason of its failure."""
        if self.is_asked:  # a test ran out of time while it waited for an answer
            self.end()
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, WORKER, self.root],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log.open("a"),
                text=True,
                # no compiler, as in a run; here megatron is imported before the engine postpones its compiled functions
                env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(REPOSITORY)},
            )
        self.is_asked = True
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        self.is_asked = False
        if not answer:
            self.end()
            return f"the worker died:\n{self.log.read_text()[-SHOWN:]}"
        return json.loads(answer)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()  # its ranks end with it
            self.process.wait()
        self.process, self.is_asked = None, False


class Answers:
    """Files that jobs have written, by name; `root` has the models."""

    def __init__(self, root: Path, workers: Workers) -> None:
        self.root, self.workers = root, workers
        self.jobs = assemble_jobs()
        self.errors: dict[str, str | None] = {}  # of the jobs that are done

    def path(self, name: str) -> Path:
        """Return a file or directory of a job; execute the job first if necessary."""
        self._do(self._job_of(name))
        return self.root / name

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.path(f"{name}.npz")) as file:
            return dict(file)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.path(f"{name}.hf") / "model.safetensors")

    def values(self, name: str) -> Any:
        return json.loads(self.path(f"{name}.json").read_text())

    def _job_of(self, name: str) -> str:
        """Return the job of a file; the names of a job's files begin with the job's name."""
        return max((job for job in self.jobs if name.startswith((f"{job}-", f"{job}."))), key=len)

    def _do(self, name: str) -> None:
        job = self.jobs[name]
        if name not in self.errors:
            if job.get("load"):
                self._do(job["load"].removesuffix(".ckpt"))
            self.errors[name] = self.workers.do(job)
        if self.errors[name]:
            pytest.fail(f"the job {name} failed:\n{self.errors[name]}")
