"""Llama, Mistral and Mixtral."""

from roll_opd.models.families.family import LLAMA, Config, Family, experts
from roll_opd.models.families.qwen import single_expert


def _missing_window(config: Config) -> tuple[str, ...]:
    if "sliding_window" in config:
        return ()
    return ("config.json lacks sliding_window, whose default is 4096; write null if the model has no windows",)


FAMILIES = (
    Family("llama"),
    Family("mistral", expects={"sliding_window": None}, problems=_missing_window),
    Family(
        "mixtral",
        LLAMA | experts("block_sparse_moe", "w1", "w3", "w2"),
        expects={"sliding_window": None},
        problems=lambda config: single_expert(config, normalised=True),
    ),
)
