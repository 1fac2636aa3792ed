"""The environment of the peers, made from requirements.txt in this directory; it is made again when that file
changes."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
HOME = HERE / ".venv"
UV_SETTINGS = HERE.parents[1] / "scripts" / "uv_settings.py"


def make() -> Path:
    """Make the environment if necessary; return its interpreter. `TORCH_INDEX_URL` is the index of torch, as for `make
    setup`."""
    python, stamp, wanted = HOME / "bin" / "python", HOME / ".setup-stamp", REQUIREMENTS.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Setting up {HOME} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME)], check=True)
    uv = Path(sys.executable).with_name("uv")  # ten times as fast as pip
    install = [str(uv), "pip"] if uv.exists() else [str(python), "-m", "pip"]
    install += ["install", "-q", "--compile"]
    settings = {**os.environ, **uv_settings(), "VIRTUAL_ENV": str(HOME)}
    if index := os.environ.get("TORCH_INDEX_URL"):
        torch = f"torch=={pins()['torch']}"
        subprocess.run([*install, "--index-url", index, torch], check=True, env=settings)
    subprocess.run([*install, "-r", str(REQUIREMENTS)], check=True, env=settings)
    stamp.write_text(wanted)
    return python


def pins() -> dict[str, str]:
    """Package -> version."""
    return dict(line.split("==") for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#"))


def uv_settings() -> dict[str, str]:
    """Return the settings with which uv uses pip's indexes."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    said = subprocess.run([sys.executable, str(UV_SETTINGS)], input=asked.stdout, capture_output=True, text=True)
    return dict(line.split("=", 1) for line in said.stdout.splitlines())
