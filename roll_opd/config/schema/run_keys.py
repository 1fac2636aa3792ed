"""Keys of every pipeline: directory, seed, steps, checkpoints, trackers, nodes."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_opd.config import roll_keys as roll
from roll_opd.config.schema.key_types import (
    AboveZero,
    Count,
    Environment,
    Many,
    Name,
    NotNegative,
    Positive,
    Seed,
    Texts,
)
from roll_opd.config.schema.section import OURS, TRINITY, Section, key


@dataclass(frozen=True, kw_only=True)
class RowKeys(Section):
    """Rows that cannot be used."""

    on_bad_row: Literal["drop", "refuse"] = key("refuse", "rows that cannot be read", OURS)
    on_long_prompt: Literal["drop", "refuse"] = key("drop", "rows that are too long", OURS)


@dataclass(frozen=True, kw_only=True)
class CheckpointKeys(Section):
    """When checkpoints are written, and how many stay."""

    save_steps: Count = key(50, "steps between checkpoints; 0: only at the end")
    max_ckpt_to_keep: Count = key(0, "newest ones that stay; 0: all")
    async_save: bool = key(False, "write them during the next steps, from copies in the host's memory", OURS)


@dataclass(frozen=True, kw_only=True)
class RunKeys(Section):
    """Keys of a run of any pipeline, outside its roles."""

    output_dir: str = key("./output", "where the directory <exp_name>/<run> is made")
    seed: Seed = key(42, "of samples, the order of rows and new weights")
    deterministic: bool = key(False, "the same bits in every run, at some cost", OURS)
    logging_steps: Positive = key(1, "steps between lines on the console")
    eval_steps: Count = key(10, "steps between validations; 0: never")
    device_memory_gb: AboveZero | None = key(
        None, "GiB of a device: what cannot fit is refused, what hardly can is warned of; else its own", OURS
    )
    is_offload_states: bool | None = key(
        None,
        "whether roles that share devices release their memory while another role runs; without it: on GPUs",
    )
    startup_timeout_s: AboveZero = key(
        1800.0, "seconds until the start of any part of a run is given up", OURS, formerly="startup_seconds"
    )
    shutdown_timeout_s: NotNegative = key(
        120.0,
        "seconds that a step may still take after SIGTERM, to end with a checkpoint",
        OURS,
        formerly="grace_seconds",
    )
    host_timeout_s: AboveZero = key(
        600.0, "seconds that the hosts of a run wait for a missing one", OURS, formerly="host_seconds"
    )
    max_restarts: Count = key(0, "automatic restarts of a failed run from its last checkpoint", OURS)


@dataclass(frozen=True, kw_only=True)
class Run(RunKeys, CheckpointKeys, RowKeys):
    """Keys of every pipeline outside the roles."""

    ignored = roll.IGNORED_TOP
    exp_name: str | None = key(None, "name of the experiment; without it that of the file")
    system_envs: Environment = key({}, "environment variables of all processes")
    track_with: Texts = key(("tensorboard",), "trackers: built-in names or dotted paths")
    tracker_kwargs: dict[str, Any] = key({}, "arguments of the tracker; of several, by name")
    num_nodes: Many | None = key(None, "without it as many as the device mappings reach over")
    num_gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = key(
        8,
        "devices of a node; without GPUs, slots that share its cores. If no role has a device_mapping either: this"
        " machine's GPUs, or two slots",
    )
    max_steps: Positive | None = key(500, "steps of the run")
    resume_from_checkpoint: bool | str = key(
        False, "true: the experiment's newest; or an experiment, run or checkpoint"
    )
    max_grad_norm: NotNegative = key(1.0, "norm at which gradients are clipped; 0: none")
    pretrain: str | None = key(None, "the model of roles that name none")
    global_template: str | None = key(None, "the template of all rows whose tag has none")
    tag_to_template: dict[str, str] = key({}, "the template of rows by tag", OURS)
    algorithm_type: str | None = key(None, "a row of algorithms, which sets the keys that are not written", TRINITY)
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = key(None, "how tokens become one loss; without it the loss's own, else seq-mean-token-mean")
    strict_strategies: bool = key(False, "refuse a strategy or precision that is not here; else: the nearest", OURS)


@dataclass(frozen=True, kw_only=True)
class PromptColumns(Section):
    """Columns of rows with an answer."""

    prompt_key: Name | None = key(None, "column of the instruction")
    query_key: Name | None = key(None, "column of a text that is appended to it")
    system_key: Name | None = key(None, "column of the system message")
    response_key: Name | None = key(None, "column of the answer")
