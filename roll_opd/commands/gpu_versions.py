"""Versions that belong together on NVIDIA GPUs. `roll-opd doctor` compares a machine with them.

`requirements/gpu.lock` has the same versions, and docs/gpu.md the reason for each (`tests/test_gpu_page.py`).
"""

DRIVER = "580.65.06"  # the first one for CUDA 13.0
CUDA = "13.0"  # of the builds of torch and vLLM
VERSIONS = {  # package -> version
    "torch": "2.13.0",
    "triton": "3.7.1",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cuda-nvcc": "13.0.88",  # compiles against the runtime's headers, which refuse another minor version
    "nvidia-cudnn-cu13": "9.20.0.48",
    "nvidia-nccl-cu13": "2.29.7",
    "vllm": "0.32.0",
    "transformer-engine": "2.20.2",
    "transformer-engine-cu13": "2.20.2",
    "transformer-engine-torch": "2.20.2",
    "flash-attn": "2.8.3.post2",
}
EXTENSION = "transformer-engine-torch"  # of Transformer Engine
COMPILED = (EXTENSION, "flash-attn")  # on the machine, against the installed torch


def command(name: str) -> str:
    """Return the command that installs a package of the table in its version."""
    options = "--no-deps --no-build-isolation --no-cache-dir --force-reinstall" if name in COMPILED else "--no-deps"
    before = "NVTE_WITH_NCCL_EP=0 " if name == EXTENSION else ""
    return f'{before}pip install {options} "{name}=={VERSIONS[name]}"'
