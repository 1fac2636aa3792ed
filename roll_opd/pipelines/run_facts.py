"""Write `run.json`. The report reads from it facts that are not in the configuration, such as machine and versions."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from roll_opd.base.failures import ConfigError, DiskFull, RunError
from roll_opd.config.plan import RunPlan
from roll_opd.pipelines.checkpoints import CheckpointError
from roll_opd.pipelines.settings_history import History
from roll_opd.tracking.run_directory import RUN_FACTS, RunDirectory, write_atomic
from roll_opd.tracking.summary import versions

GPUS = Path("/proc/driver/nvidia/gpus")  # a query through CUDA would allocate device memory
MEMORY = Path("/proc/meminfo")
MAX_ERROR_LENGTH = 2000  # maximum characters of an error
SENTENCES = (RunError, CheckpointError, ConfigError, DiskFull)  # errors whose text is written for users


def run_facts(plan: RunPlan, history: History) -> dict[str, Any]:
    """Return facts about the run: mode, models, machine, versions, and the changed settings of each part.

    The machine is the node on which this process runs. `hub` has the commit of each name on a hub.
    """
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "mode": plan.mode,
        "pipeline": plan.kind,
        "title": plan.title,
        "directory": os.getcwd(),  # where relative paths of the configuration begin
        "models": {
            "student": plan.student.model.path,
            **{_of(teacher.name): teacher.source.location for teacher in plan.teachers},
            **({"reference": plan.reference.model.path} if plan.reference else {}),
        },
        "hub": {name: use.commit for name, use in plan.hub.items()},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "memory": _memory(),
            "GPUs": ", ".join(_gpus()),
            "nodes": plan.num_nodes,
            "devices a node": plan.devices_per_node,
        },
        "versions": versions(),
        "warnings": list(plan.warnings),
        "parts": history.as_facts(),
    }


def write_facts(run: RunDirectory, facts: dict[str, Any]) -> None:
    """Write `facts` as `run.json`, atomically. Raises `OSError`."""
    write_atomic(run.path / RUN_FACTS, json.dumps(facts, indent=2) + "\n")


def note_end(run: RunDirectory, error: BaseException) -> None:
    """Write the error that ended the run early into `run.json`."""
    facts = run.read_facts()
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    else:
        text = str(error) if isinstance(error, SENTENCES) else f"{type(error).__name__}: {error}"
    write_facts(run, {**facts, "ended": text[:MAX_ERROR_LENGTH]})


def _of(teacher: str) -> str:
    return teacher if teacher == "teacher" else f"teacher {teacher}"


def _memory() -> str:
    first = _line(MEMORY, "MemTotal")
    return f"{int(first.split()[0]) / 2**20:.0f} GiB" if first else ""


def _gpus() -> list[str]:
    places = sorted(GPUS.iterdir()) if GPUS.is_dir() else []
    return [_line(place / "information", "Model") for place in places]


def _line(path: Path, name: str) -> str:
    """Return the value of the line `name:` in a file of the kernel, or "" if the file has no such line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
