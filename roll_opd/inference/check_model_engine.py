"""Program that computes a model's log-probs with a vLLM engine, for `roll-opd check-model`."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from roll_opd.config.plan import ModelPlan
from roll_opd.config.schema import Dtype
from roll_opd.inference.engine_arguments import prepare_environment
from roll_opd.inference.vllm_engine import InferenceEngine


async def write_parity(model: str, dtype: Dtype, sequences: list[list[int]], directory: Path) -> None:
    """Compute the log-probs of the sequences, and write them to `logprobs.npz` in the directory.

    The file has one array per sequence, f32 [T-1] for T tokens. The key of an array is the index of the sequence.
    """
    longest = max(map(len, sequences)) + 1
    engine = await InferenceEngine.start(ModelPlan(model, dtype), max_model_len=longest, seed=0)
    found: dict[str, Any] = {
        str(number): await engine.prompt_logprobs(tokens) for number, tokens in enumerate(sequences)
    }
    np.savez(directory / "logprobs.npz", **found)
    await engine.close()


if __name__ == "__main__":
    prepare_environment(eager_on_cpu=True)
    settings = json.loads(sys.argv[1])
    asyncio.run(write_parity(settings["model"], settings["dtype"], settings["sequences"], Path(settings["directory"])))
