"""Training state as ranks save it, of a model of one tensor."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def write_state(directory: Path) -> None:
    directory.mkdir(parents=True)
    dcp.save({"weight": torch.arange(1000.0)}, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    torch.save({"random": 0}, directory / "common.pt")
