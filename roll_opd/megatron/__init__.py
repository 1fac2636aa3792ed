"""Training engine on Megatron-core."""

import warnings

from roll_opd.base.torch_imports import lazy_compile

# printed by each process; local layers and `fused_updates` replace these optional packages
warnings.filterwarnings(
    "ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed", module=r"megatron\."
)

with lazy_compile():  # also for later imports, since `megatron.core.jit` keeps the decorator
    import megatron.core  # noqa: F401
