"""Keys of every pipeline: directory, seed, steps, checkpoints, trackers, nodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

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
from roll_opd.config.schema.section import Section, key, ours, trinity


@dataclass(frozen=True, kw_only=True)
class RowKeys(Section):
    """Keys that set what happens to unusable rows."""

    on_bad_row: Literal["drop", "refuse"] = ours("refuse", "what to do with rows that cannot be read")
    on_long_prompt: Literal["drop", "refuse"] = ours("drop", "what to do with rows that are too long")


@dataclass(frozen=True, kw_only=True)
class CheckpointKeys(Section):
    """Keys that set how often checkpoints are written and how many are kept."""

    save_steps: Count = key(50, "number of steps between checkpoints; 0: only at the end")
    max_ckpt_to_keep: Count = key(0, "number of newest checkpoints to keep; 0: all")
    async_save: bool = ours(False, "write checkpoints during the next steps, from copies in the host's memory")


@dataclass(frozen=True, kw_only=True)
class RunKeys(Section):
    """Keys that every pipeline has, and that the plan contains unchanged."""

    output_dir: str = key("./output", "directory in which the run's directory <exp_name>/<run> is created")
    logging_dir: str | None = key(
        None, "directory in which a copy of the run's logs is written: <exp_name>-<run>/console.log and ray/"
    )
    seed: Seed = key(42, "seed of sampling, row order and new weights")
    deterministic: bool = ours(False, "every run gives bitwise equal results; this takes more time")
    logging_steps: Positive = key(1, "number of steps between two log lines on the console")
    eval_steps: Count = key(10, "steps between validations; 0: never")
    device_memory_gb: AboveZero | None = ours(
        None,
        "memory of a device, GiB, which the planner compares with its estimate: a plan that does not fit is"
        " refused, and a plan that may not fit gets a warning; default: the memory of this machine's devices",
    )
    is_offload_states: bool | None = key(
        None, "release a role's device memory while another role uses the devices; default: true on GPUs"
    )
    startup_timeout_s: AboveZero = ours(1800.0, "time limit for starting each part of a run, s")
    server_timeout_s: NotNegative = ours(
        5.0,
        "how long a run waits at its start for a server that accepts no connections (of a teacher, judge, remote"
        " reward, environment or auxiliary model), s",
    )
    shutdown_timeout_s: NotNegative = ours(
        120.0, "time limit after SIGTERM for finishing the step and writing a checkpoint, s"
    )
    host_timeout_s: AboveZero = ours(600.0, "how long hosts wait for a missing host, s")
    stall_timeout_s: AboveZero | None = ours(
        None,
        "time without progress after which a run ends, s; the error lists what the run was waiting for."
        " default: no limit",
    )
    hang_timeout_s: AboveZero | None = ours(
        300.0,
        "time without a sign of life after which the process of a model is killed, s; it is then replaced like one that"
        " has ended; null: never",
    )
    max_restarts: Count = ours(0, "how many times a failed run restarts from its last checkpoint")


@dataclass(frozen=True, kw_only=True)
class ChatKeys(Section):
    """Keys of the prompts that the student reads."""

    system_prompt: str | None = ours(
        None, "system message of every conversation that has none; with a workflow, task.format_args.system_prompt"
    )
    chat_template_kwargs: dict[str, Any] = ours(
        {},
        "variables of the chat templates, such as enable_thinking: false; a row's own chat_template_kwargs take"
        " precedence",
    )


@dataclass(frozen=True, kw_only=True)
class Run(RunKeys, CheckpointKeys, RowKeys, ChatKeys):
    """Keys of every pipeline, except the keys of roles. A subclass that sets `pipeline` adds a pipeline."""

    ignored = roll.IGNORED_TOP
    pipeline: ClassVar[str]  # the loop: a module in `roll_opd.pipelines`, or the path of a user's module
    title: ClassVar[str]  # display name
    own_keys: ClassVar[frozenset[str]] = frozenset()  # keys that identify the pipeline of a configuration
    loop: ClassVar[str] = ""  # the pipeline whose loop is used; default: the loop in the module of this pipeline
    launcher: ClassVar[tuple[str, str] | None] = None  # description of the pipeline, and its file in examples/

    exp_name: str | None = key(None, "name of the experiment; default: the file's name")
    system_envs: Environment = key({}, "environment variables of all processes")
    track_with: Texts = key(("tensorboard",), "trackers: built-in names or dotted paths")
    tracker_kwargs: dict[str, Any] = key(
        {}, "arguments of the tracker; for several trackers, a map from names to arguments"
    )
    num_nodes: Many | None = key(None, "number of nodes; default: the number that the device mappings need")
    num_gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = key(
        8,
        "number of devices per node; on a machine without GPUs, devices are slots that share the cores. If no"
        " role has a device_mapping, the default is the number of this machine's GPUs, or two slots",
    )
    max_steps: Positive | None = key(500, "steps of the run")
    resume_from_checkpoint: bool | str = key(
        False,
        "checkpoint from which the run resumes: true for the newest checkpoint of the experiment, or the"
        " directory of an experiment, of a run or of a checkpoint",
    )
    max_grad_norm: NotNegative = key(1.0, "maximum gradient norm; 0: no clipping")
    pretrain: str | None = key(None, "model of all roles that do not set model_name_or_path")
    global_template: str | None = key(None, "template of the prompts whose tag is not in tag_to_template")
    tag_to_template: dict[str, str] = ours({}, "map from a tag to the template of the prompts with that tag")
    algorithm_type: str | None = trinity(
        None, "name of an entry in the table of algorithms; the entry sets the defaults of other keys"
    )
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = key(
        None,
        "how token losses are aggregated; default: the mode that the policy loss defines; if it defines none,"
        " seq-mean-token-mean",
    )
    strict_strategies: bool = ours(
        False,
        "true: refuse a strategy or precision that is not available; false: use the nearest available strategy"
        " or precision",
    )

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no property `longest`; write it")

    def __init_subclass__(cls) -> None:
        if "pipeline" in vars(cls):
            PIPELINES[cls.pipeline] = cls

    @classmethod
    def selected_by(cls, values: Mapping[str, Any]) -> str | None:
        """Return the key of the configuration `values` that selects this pipeline, or None."""
        return next(iter(sorted(cls.own_keys & values.keys())), None)


PIPELINES: dict[str, type[Run]] = {}  # pipeline -> its keys


@dataclass(frozen=True, kw_only=True)
class PromptColumns(Section):
    """Columns of rows with an answer."""

    prompt_key: Name | None = key(None, "column of the instruction")
    query_key: Name | None = key(None, "column of a text that is appended to the instruction")
    system_key: Name | None = key(None, "column of the system message")
    response_key: Name | None = key(None, "column of the answer")
