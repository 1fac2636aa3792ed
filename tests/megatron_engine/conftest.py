"""Launches the Megatron workers, once for each world size however many tests read their answers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_reference import save_models
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("megatron_worker.py")
TIME_LIMIT = 400  # seconds; a launch takes well under 100


class Launches:
    """The workers' answers, computed when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._outcome: dict[str, str | None] = {}

    def run(self, launch: str) -> "Launches":
        """Make sure that launch `launch` has been run; its failure fails every test that needs it."""
        if launch not in self._outcome:
            self._outcome[launch] = self._started(launch)
        if self._outcome[launch]:
            pytest.fail(f"launch {launch} failed:\n{self._outcome[launch]}")
        return self

    def _started(self, launch: str) -> str | None:
        ranks = "2" if launch == "resume" else launch
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        log = self.root / f"launch-{launch}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, str(WORKER), launch, str(self.root)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            try:
                code = process.wait(TIME_LIMIT)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks
                process.wait(60)
                return f"no end after {TIME_LIMIT} s\n{log.read_text()[-6000:]}"
        return log.read_text()[-6000:] if code else None

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.root / f"{name}.npz") as file:
            return dict(file)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.root / f"{name}.hf" / "model.safetensors")


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    root = tmp_path_factory.mktemp("megatron")
    save_models(root / "models")
    return Launches(root)
