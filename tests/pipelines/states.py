"""Training state in the form that ranks save, for a model with one tensor."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def write_state(directory: Path) -> None:
    directory.mkdir(parents=True)
    dcp.save({"weight": torch.arange(1000.0)}, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    torch.save({"random": 0}, directory / "common.pt")
