"""What the Megatron workers wrote, as tests read it."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file


class Answers:
    """What the workers wrote."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.root / f"{name}.npz") as file:
            return dict(file)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.root / f"{name}.hf" / "model.safetensors")
