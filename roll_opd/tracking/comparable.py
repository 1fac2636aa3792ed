"""Check whether the metrics of a resumed run are comparable over its parts, from the settings that changed."""

import re
from collections.abc import Sequence
from typing import Any

# keys of optimization, placement and validation, which do not change the definition of a step's metrics
HARMLESS = re.compile(
    r"max_steps|num_train_epochs|seed|ppo_epochs|rollout_batch_size|num_return_sequences_in_group|eval_steps"
    r"|num_nodes|num_gpus_per_node|is_offload_states|weight_sync|deterministic|teacher_preflight"
    r"|(.*\.)?(training_args\..*|learning_rate|max_grad_norm|device_mapping|infer_batch_size|sleep_level)"
    r"|.*\.(max_tokens_per_microbatch_in_\w+|max_running_requests)|max_additional_running_prompts"
    r"|.*\.strategy_config\.(\w+_parallel\w*|sequence_parallel|overlap_\w+|\w+_optimizer|enforce_eager|max_num_seqs)"
    r"|validation\.(generating_args\..*|measure_teacher)"
)


def changed_settings(parts: Any) -> str:
    """Return the reason why metrics are not comparable over `parts` (of `summary.json`); "" if they are."""
    later = parts[1:] if isinstance(parts, Sequence) and not isinstance(parts, str) else ()
    changes = [part.get("changed") if isinstance(part, dict) else None for part in later]
    if any(not HARMLESS.fullmatch(str(key)) for change in changes if isinstance(change, dict) for key in change):
        return "settings changed"
    return "settings unknown" if any(not isinstance(change, dict) for change in changes) else ""
