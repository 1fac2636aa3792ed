"""A run directory with a checkpoint, made of the demo's models without training."""

import json
import shutil
from pathlib import Path

from roll_opd.commands.init_project import write
from roll_opd.pipelines.checkpoints import HF
from roll_opd.tracking.run_directory import STATE_FILE


def project_with_run(place: Path, model: str = "student") -> Path:
    """Write the example `start` into `place`, and a run in which its student has become the model of that name."""
    write(place, "start")
    run = place / "output/mine/20300102-030405"
    checkpoint = run / "checkpoints/step_3"
    shutil.copytree(place / "models" / model, checkpoint / HF)
    (checkpoint / STATE_FILE).write_text("{}")
    (checkpoint / HF / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# A card\n")
    shutil.copy(place / "distill.yaml", run / "config.yaml")
    (run / "run.json").write_text(json.dumps({"mode": "pure", "pipeline": "rlvr", "directory": str(place)}))
    (run.parent / "latest").symlink_to(run.name)
    return run
