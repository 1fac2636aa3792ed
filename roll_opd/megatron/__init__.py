"""Training engine on Megatron-core."""

import warnings

# printed by each process; local layers and `fused_updates` replace these optional packages
warnings.filterwarnings(
    "ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed", module=r"megatron\."
)
