"""Write log-probs and exported weights of a model in one layout, for `roll-opd check-model`. Runs under torchrun."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan
from roll_opd.megatron import parallel
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import save_hf


def write_parity(model: str, tp: int, etp: int, sequences: list[list[int]], directory: Path) -> None:
    """Write the log-probs of `sequences`, and export the model. Collective.

    - `logprobs.npz` in `directory`: sequence number -> f32 [T-1]
    - `hf/` in `directory`: the exported model
    """
    layout = Layout(tp=tp, etp=etp)
    plan = MegatronPlan("check-model", ModelPlan(model), tuple(range(tp)), layout, MicroBatchLimits())
    engine = MegatronEngine(plan, seed=0)
    found = engine.compute_logprobs([(np.array(tokens, dtype=np.int64), 1) for tokens in sequences], 1.0)
    save_hf(engine, directory / "hf")
    if dist.get_rank() == 0:
        arrays: dict[str, Any] = {str(number): values for number, values in (found or {}).items()}
        np.savez(directory / "logprobs.npz", **arrays)
    parallel.shutdown()


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    write_parity(**{**settings, "directory": Path(settings["directory"])})
