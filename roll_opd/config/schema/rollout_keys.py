"""Keys of runs with a rollout: batches, validation, demonstrations and workflows.

`Top` has all keys of the top level of a file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from roll_opd.config import roll_keys as roll
from roll_opd.config.schema.key_types import AboveZero, Count, Fraction, Many, Name, NotNegative, Positive, Versions
from roll_opd.config.schema.objective_keys import CriticKeys, ObjectiveKeys, StepKeys, TrainInferCorrection
from roll_opd.config.schema.run_keys import PromptColumns, Run
from roll_opd.config.schema.section import Section, derived, key, keys_of, ours, trinity
from roll_opd.config.schema.worker_keys import DataArgs, GeneratingArgs, Worker

if TYPE_CHECKING:  # these types inherit from the keys
    from roll_opd.config.plan import DataPlan, ObjectivePlan, RunPlan, ValidationPlan


@dataclass(frozen=True, kw_only=True)
class RolloutKeys(Section):
    """Keys of a step's rollout."""

    read_if: ClassVar[Mapping[str, str]] = {"async_generation_ratio": "async_depth on_weight_update"}

    rollout_batch_size: Many = key(128, "number of prompts in a step")
    logged_samples_per_step: Annotated[int, Field(ge=0, le=10**6)] = ours(
        4, "number of samples per step that are written to samples.jsonl"
    )
    async_generation_ratio: Versions = key(
        0,
        "maximum age of a token in training: the number of weight versions by which the weights that sampled"
        " the token may be older than the student; 0: generation and training take turns",
    )
    async_depth: Positive | None = ours(
        None,
        "number of batches that may be generated while an earlier batch is in training; default:"
        " async_generation_ratio, but at most 2",
    )
    on_weight_update: Literal["wait", "continue"] = ours(
        "continue",
        "with async_generation_ratio: what to do at a weight update with answers that are being generated;"
        " wait: finish the answers before the update; continue: continue the answers with the new weights and a"
        " recomputed KV cache",
    )
    validation_engines: Count = ours(
        0,
        "with async_generation_ratio: number of engines that are reserved for validation, so that training does not"
        " wait for a validation; 0: validation uses all engines",
    )
    min_batch_fraction: Fraction = ours(
        0.0, "minimum fraction of a step's runs that must not fail; if more runs fail, training ends before the update"
    )
    max_lost_workers: Count | None = ours(
        None,
        "maximum number of processes that may be lost within an hour, for each model, each reward domain and the"
        " workflow; if more are lost, training ends; default: no limit",
    )
    weight_sync: Literal["auto", "shared_memory", "m2n"] = ours(
        "auto",
        "transport of new weights to the engines; auto: CUDA IPC, NCCL or shared memory, depending on the"
        " devices of student and engines; shared_memory: always through the hosts' memory; m2n: each of the student's"
        " GPUs sends its part of the weights (vLLM's nccl_m2n; not run yet)",
    )
    lora_sync: Literal["auto", "adapter", "merged"] = ours(
        "auto",
        "what the engines get of a LoRA student; adapter: only the adapter, which they apply in addition to the base"
        " model; merged: all weights, with the adapter merged into them; auto: adapter on GPUs, merged on CPUs",
    )
    engine_check: bool | Literal["warn"] = ours(
        True,
        "test in each step whether the inference engine samples from the student, and compare their log-probs; true:"
        " end the run if it does not; warn: report the problem and continue",
    )
    teacher_preflight: bool | Literal["warn"] = ours(
        True,
        "check each teacher on the first samples, before the first update; true: end the run if a check fails;"
        " warn: report the problem and continue",
    )
    allow_self_teacher: bool = ours(False, "accept a teacher with the same weights as the student")


@dataclass(frozen=True, kw_only=True)
class Validation(Section):
    """`validation`."""

    # ROLL's validation is a role, so keys of a role are ignored
    ignored = (roll.IGNORED_WORKER | keys_of(Worker).keys() | {"eval_steps"}) - {"data_args", "generating_args"}
    data_args: DataArgs = key(DataArgs(), "held-out rows")
    generating_args: GeneratingArgs = key(GeneratingArgs(), "sampling of the answers")
    evaluate_teacher: bool = ours(
        False, "let the teacher answer the held-out prompts once, and score its answers for comparison"
    )


@dataclass(frozen=True, kw_only=True)
class Demonstrations(PromptColumns):
    """`demonstrations`: rows with answers, which the policy losses mix and mix_chord add to each update."""

    data_args: DataArgs = ours(DataArgs(), "the rows")


@dataclass(frozen=True, kw_only=True)
class WorkflowKeys(Section):
    """The workflow that processes a row, for tasks that need more than one answer per row."""

    read_if: ClassVar[Mapping[str, str]] = {"workflow": "*", "workflow_reward": "workflow_reward_args"}

    workflow: Name | None = ours(
        None, "the workflow: a name or a dotted path; default: no workflow, one answer per prompt"
    )
    workflow_args: dict[str, Any] = ours({}, "its task.workflow_args")
    workflow_reward: Name | None = ours(
        None, "the workflow's reward function (task.reward_fn): a registered name or a dotted path"
    )
    workflow_reward_args: dict[str, Any] = ours({}, "arguments of that function")
    plugin_dir: Name | None = ours(
        None, "directory whose Python modules are imported, for example to register workflows"
    )
    prompt_key: Name = ours("prompt", "column whose value is task.task_desc")
    response_key: Name = ours("ground_truth", "column of the ground truth, which is task.truth in the workflow")
    reply_prefix: str | None = ours(None, "task.format_args.reply_prefix: the words with which every answer starts")
    workflow_workers: Annotated[int, Field(ge=1, le=4096)] = ours(2, "number of processes that run the workflow")
    workflow_concurrency: Many = ours(128, "number of concurrent workflow calls in each process")
    workflow_timeout: AboveZero = ours(600.0, "time limit of a workflow call, s")
    workflow_memory_gb: AboveZero = ours(16.0, "memory limit of each process, GiB")
    endpoint_host: Name = ours("127.0.0.1", "address of this machine at which OpenAI clients reach the policy")
    endpoint_port: Annotated[int, Field(ge=0, le=65000)] = ours(
        0,
        "port of the endpoint in the first workflow process; the next process uses the next port, and so on; 0:"
        " each process uses any free port. A process opens its port at the first use of the endpoint",
    )
    endpoint_api_key: Name | None = ours(
        None,
        "one API key that all workflow calls share; if it is set, the URL or a header of a request identifies"
        " the workflow call",
    )
    tool_call_parser: Name = ours("hermes", "format of tool calls: a name that vLLM accepts for --tool-call-parser")
    on_workflow_error: Literal["drop", "replace", "stop"] = ours(
        "drop",
        "what to do with a workflow call that fails; drop: drop the call; replace: drop the group of the call"
        " and take another prompt; stop: end the run",
    )


@dataclass(frozen=True, kw_only=True)
class RemoteModelKeys(Section):
    """An auxiliary model on a server with an OpenAI-compatible API."""

    base_url: Name = ours("", "address of the server, including /v1")
    api_key: Name = ours("EMPTY", "API key of the server")
    model_name: Name = ours("", "name of the model on that server")


@dataclass(frozen=True, kw_only=True)
class Top(Run, ObjectiveKeys, StepKeys, CriticKeys, RolloutKeys, WorkflowKeys):
    """All keys of a run with a rollout, except the keys of its roles. Each further pipeline is a subclass."""

    read_if: ClassVar[Mapping[str, str]] = {"teachers": "opd_kl_coef opd_use_policy_gradient"}
    pipeline = "rlvr"
    title = ""  # by mode
    # a pipeline that makes its own prompts and rewards, such as games, sets `makes_tasks` and has the methods below
    makes_tasks: ClassVar[bool] = False
    tasks_in: ClassVar[str] = ""  # follows the title of the mode
    group_key: ClassVar[str] = "num_return_sequences_in_group"  # sets the number of samples that are compared
    max_steps: Positive = key(500, "steps of the run")
    prompt_length: Positive = key(1024, "maximum tokens of a prompt")
    response_length: Positive | None = key(None, "maximum tokens of a response")
    sequence_length: Positive | None = key(
        None, "maximum tokens of a prompt plus its response; used in place of response_length"
    )
    val_prompt_length: Positive | None = key(None, "maximum tokens of a validation prompt")
    val_sequence_length: Positive | None = key(None, "maximum tokens of a validation prompt plus its answer")
    num_return_sequences_in_group: Many | None = key(None, "number of responses to a prompt")
    validation: Validation | None = key(None, "held-out prompts, which the student answers every eval_steps steps")
    demonstrations: Demonstrations | None = ours(
        None, "rows with answers, on which the student is trained in addition to its samples"
    )
    expert_data_ratio: Fraction | None = trinity(
        None, "fraction of demonstrations in an update; default: set by the algorithm"
    )
    is_pure_opd: bool = key(False, "train on the teachers' log-probs only")
    use_opd: bool = key(False, "train on the teachers' log-probs and on rewards")
    pure_opd_pipeline_type: Literal["rlvr", "agentic"] = key("rlvr", "rlvr: prompts; agentic: environments")
    opd_kl_coef: NotNegative = key(1.0, "weight of the teachers' reverse KL")
    opd_use_policy_gradient: bool | None = ours(
        None, "accepted if it agrees with opd_objective, which selects the form of the teachers' term"
    )
    teacher_tokenizer_check: Literal["strict", "warn", "align"] = ours(
        "strict",
        "what to do if an id is a different token for student and teacher; strict: refuse the run; warn: log a"
        " warning; align: align the tokens of the two tokenizers by their bytes",
    )
    adv_estimator: str | None = key(None, "estimator of advantages; default gae")
    advantage_fn: str | None = trinity(
        None, "Trinity-RFT's key for adv_estimator: a built-in or registered name, or a dotted path"
    )
    advantage_fn_args: dict[str, Any] = trinity({}, "arguments of the advantage")
    policy_loss: str | None = ours(
        None, "the policy loss; default: importance_sampling in pure distillation, ppo in other runs"
    )
    policy_loss_fn: str | None = trinity(
        None, "Trinity-RFT's key for policy_loss: a built-in or registered name, or a dotted path"
    )
    policy_loss_fn_args: dict[str, Any] = trinity({}, "arguments of the loss")
    use_pg_clip_range: bool | None = key(
        None,
        "use pg_clip_low and pg_clip_high in place of pg_clip; default: false as in ROLL, but true if the loss"
        " is selected by a key that ROLL does not have",
    )
    dual_clip_loss: bool | Annotated[float, Field(gt=1)] = key(
        False, "bound on the loss of tokens with a negative advantage: a number, or true for 1 + 2 x pg_clip"
    )
    enable_old_logprobs_recompute: bool = key(
        False, "compute log-probs before the update even if the update does not need them"
    )
    train_infer_correction: TrainInferCorrection = key(TrainInferCorrection(), "correction of log-probs")
    use_kl_loss: bool | None = key(None, "add to the loss a KL term between student and reference policy")
    kl_loss_fn: str | None = trinity(
        None, "estimator of the KL loss: none, or a name in objective.reference_kl; default: low_var_kl"
    )
    add_token_level_kl: bool = key(
        False, "subtract the KL between student and reference policy from each token's reward"
    )
    init_kl_coef: NotNegative = key(0.2, "coefficient of the token-level KL")
    max_running_requests: Positive | None = key(
        None, "maximum number of concurrent requests, as a sum over all engines"
    )
    is_use_additional_prompts: bool = key(
        False, "answer more prompts than a step needs, in case filters reject some prompts"
    )
    max_additional_running_prompts: Annotated[int, Field(ge=0, le=10**6)] = key(
        16, "maximum concurrent additional prompts"
    )
    pg_variant: str | None = key(
        None,
        "policy loss; used only if the student's role sets neither pg_variant nor worker_cls. ROLL reads only"
        " the keys of the role",
    )
    importance_sampling: str | None = key(
        None, "ratio of the policy loss; token: one ratio for each token; seq: one ratio for each sequence"
    )
    responses: int = derived(1)  # per prompt
    response_tokens: int | None = derived(None)  # of the longest response; None: a problem was reported
    held_out_tokens: int | None = derived(None)  # of the longest response in validation; None: as in training

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.prompt_length + (self.response_tokens or 0)

    def arguments(self) -> Mapping[str, Any]:
        """Return the values of the pipeline's further keys, which `plan.pipeline_args` has."""
        return {name: getattr(self, name) for name in keys_of(type(self)).keys() - keys_of(Top)}

    # planning of a pipeline that makes its own tasks

    @classmethod
    def before_roles(cls, sections: Any) -> None:
        """Change the sections of the configuration (`planner.validate_sections.Sections`) before the roles are read."""

    def with_tasks(self, args: GeneratingArgs | None) -> Self:
        """Return these keys with the sizes and the workflow of the tasks. `args` are those of the rollout."""
        return self

    def tasks(self) -> "tuple[DataPlan, DataPlan | None]":
        """Return the tasks of training and of validation."""
        raise NotImplementedError(f"{type(self).__name__} makes its tasks, and has no method `tasks`; write it")

    def held_out_tasks(self, args: GeneratingArgs, response: int) -> "ValidationPlan | None":
        """Return the plan of validation. `response` is the number of tokens of a response."""
        return None

    def objective_of_tasks(self, plan: "ObjectivePlan") -> "ObjectivePlan":
        """Return the objective with the groups of tasks in which rewards are compared."""
        return plan

    def check_advantage(self, facts: Any) -> bool:
        """Report an advantage that does not fit the tasks; return whether rewards are compared in groups of samples."""
        return True

    # a run of a pipeline that makes its own tasks

    @classmethod
    def open_tasks(cls, plan: "RunPlan") -> tuple[Any, list[Any]]:
        """Return the source of training tasks (`data.prompt_source.TaskSource`), and the validation tasks."""
        raise NotImplementedError(f"{cls.__name__} makes its tasks, and has no method `open_tasks`; write it")

    @classmethod
    def named_code(cls, plan: "RunPlan") -> Iterator[str]:
        """Yield the names of the tasks' classes, to find out whether the user has written one of them."""
        return iter(())

    @classmethod
    def check_code(cls, plan: "RunPlan") -> Iterator[str]:
        """Import the classes of the tasks; yield their problems."""
        return iter(())

    @classmethod
    def servers(cls, plan: "RunPlan") -> Iterator[tuple[str, str, str]]:
        """Yield (key, address, remedy) of each server that the tasks need."""
        return iter(())
