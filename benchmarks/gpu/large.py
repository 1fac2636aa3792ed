"""The whole loop on GPUs, with vLLM and Ray: what each phase of a step takes, and its share of what the GPU can do.

    python benchmarks/gpu/loop.py [key=value ...] [--student 0.6e9] [--teacher 4e9] [--steps 6] [--json OUT]

`limits.py` (README.md says how to read its table) with a configuration for one GPU that all roles share: bf16, 64
prompts of 4 answers of 1,024 tokens, models with random weights. Others: `num_gpus_per_node=8
student_train.device_mapping=[0,1,2,3] ...`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import limits

ROLES = ("student_train", "student_infer", "teacher")
PACK = 16_384  # tokens of a micro-batch
SETTINGS = [
    "num_gpus_per_node=1",
    *(f"{role}.device_mapping=[0]" for role in ROLES),
    *(f"{role}.model_args.dtype=bf16" for role in ROLES),
    "rollout@student_infer.strategy_args.strategy_config=gpu_colocated",
    "student_infer.strategy_args.strategy_config.max_num_seqs=256",
    "rollout_batch_size=64",
    "response_length=1024",
    "student_train.training_args.per_device_train_batch_size=64",
    "student_train.training_args.gradient_accumulation_steps=4",  # 64 x 4: one update a step
    f"student_train.max_tokens_per_microbatch_in_train={PACK}",
    f"student_train.max_tokens_per_microbatch_in_infer={PACK}",
    f"teacher.max_tokens_per_microbatch_in_infer={PACK}",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `limits.py` with these settings; what the command line says comes after them."""
    given = sys.argv[1:] if arguments is None else arguments
    return limits.main(["--cases", "larger", "--student", "0.6e9", "--teacher", "4e9", *SETTINGS, *given])


if __name__ == "__main__":
    sys.exit(main())
