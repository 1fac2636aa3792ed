"""The Triton kernels: runs `megatron_kernels.py` in a process with Triton's interpreter, which is set at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "chosen",
    # Triton interprets each element of a grid in Python: all kernels take 14 s
    [pytest.param("", marks=pytest.mark.nightly, id="all"), pytest.param("swiglu", id="few")],
)
def test_kernels_and_their_gradients_are_torchs_in_f64(chosen: str) -> None:
    pytest.importorskip("triton", reason="needs Triton, which torch brings on GPUs (pip install triton)")
    # the imports of this directory's fixtures take longer than a kernel
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-W", "ignore"]
    done = subprocess.run(
        [*command, "-k", chosen, str(Path(__file__).with_name("megatron_kernels.py"))],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
