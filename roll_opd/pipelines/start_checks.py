"""Check a plan and open its data before any process starts."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from roll_opd.base.failures import ConfigError
from roll_opd.base.installed import missing_libraries
from roll_opd.base.terminal import echo, warn
from roll_opd.base.torch_imports import broken_companions, hide
from roll_opd.config.plan import DataPlan, FilePlan, LoraPlan, RunPlan, TrainPlan
from roll_opd.data.data_checks import check_coverage, overlap_warning, unused_warnings
from roll_opd.data.dataset import Prompt, PromptSet, open_prompts
from roll_opd.data.prompt_source import MixedSource, PromptSource, TaskSource
from roll_opd.data.row_files import whole_steps
from roll_opd.data.row_formats import DataError
from roll_opd.data.teacher_files import ScoredSet, open_teacher_files
from roll_opd.data.teacher_scores import Expected
from roll_opd.data.templates import load_tokenizer, set_chat_variables, set_date, writes_date
from roll_opd.models.adapter_files import read_adapter
from roll_opd.models.model_info import read_model
from roll_opd.models.tokenizer_files import vocabulary_fingerprint
from roll_opd.models.weight_files import lost_weights
from roll_opd.pipelines import settings_history
from roll_opd.pipelines.check_machine import machine_problems, other_blocks
from roll_opd.pipelines.check_user_code import check_user_code
from roll_opd.pipelines.checkpoints import (
    ADAPTER,
    CRITIC,
    FOLLOWERS,
    Checkpoint,
    CheckpointError,
    damage,
    find,
    instead_of,
)
from roll_opd.pipelines.settings_history import History
from roll_opd.pipelines.user_code import task_keys
from roll_opd.rewards import reward_registry as rewards
from roll_opd.tracking.run_directory import STATE_FILE

NATIVE_BF16 = ("amx_bf16", "avx512_bf16", "bf16")  # names in torch.cpu.get_capabilities: two for x86, one for ARM
CLUSTER_SECONDS = 5.0  # time in which a Ray cluster must answer
# facts of a model that determine the shapes of its weights
SHAPES = ("model_type", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "experts")


@dataclass(frozen=True)
class Inputs:
    """The checked and opened inputs of a run, and the checkpoint from which the run resumes."""

    resumed: Checkpoint | None  # None for a new run
    history: History  # settings of the run's steps
    tokenizer: PreTrainedTokenizerBase
    source: TaskSource  # a `MixedSource` if there are demonstrations
    held_out: list[Prompt]
    began: datetime  # start of the run, in local time; chat templates use its date


def preflight(plan: RunPlan) -> Inputs:
    """Check the plan against the machine, the checkpoint, the user's code and the data. Return the opened inputs.

    Warnings are printed. Raises ConfigError, CheckpointError, DataError, or the error of a function, reward, tracker or
    model that cannot be used.
    """
    for warning in plan.warnings:
        warn(warning)
    resumed = find(plan.checkpoint, plan.output_dir, plan.exp_name)
    if resumed and (damaged := damage(resumed.path)):
        raise CheckpointError(f"{damaged}; {instead_of(resumed.path)}")
    settings = settings_history.begun(plan)
    if resumed:
        earlier = settings_history.parts_of(resumed.parts, resumed.step)
        settings = settings_history.continued(earlier, plan, resumed.step)
    problems = checkpoint_problems(plan, resumed) if resumed else []
    problems += settings_history.optimizer_problems(settings, resumed.path) if resumed else []
    problems += package_problems()
    if address := os.environ.get("RAY_ADDRESS"):  # an existing cluster is checked on joining
        problems += cluster_problems(address)
    else:
        gpus = torch.cuda.device_count()
        problems += machine_problems(plan, gpus)
        if not gpus:
            for warning in filter(None, (emulated_bf16(plan, torch.cpu.get_capabilities()), other_blocks(plan))):
                warn(warning)
    problems += _lost_weights(plan)
    if problems:
        raise ConfigError(problems)
    check_user_code(plan)
    now = datetime.now()
    began = resumed.began if resumed and resumed.began else now
    set_date(began)
    set_chat_variables(plan.chat_template_kwargs)
    tokenizer = load_tokenizer(plan.student.model.path)
    if began.date() != now.date() and writes_date(tokenizer):
        echo(f"The chat template writes the date into prompts; this run keeps the date of its start, {began:%d %B %Y}")
    source, held_out = open_data(plan, tokenizer)
    if resumed:
        _restore(source, resumed)
    return Inputs(resumed, settings, tokenizer, source, held_out, began)


def _restore(source: TaskSource, resumed: Checkpoint) -> None:
    try:
        source.load_state_dict(resumed.source_state)
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{resumed.path}: {STATE_FILE} is damaged ({type(error).__name__}: {error}); {instead_of(resumed.path)}"
        ) from error


def cluster_problems(address: str) -> list[str]:
    """Return an error if the Ray cluster at host:port cannot be reached.

    Ray would try to connect for minutes before it fails.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        return []  # "auto" and other special values: Ray reports errors in these
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CLUSTER_SECONDS).close()
    except OSError as error:
        why = error.strerror or str(error)
        return [f"RAY_ADDRESS: {address} cannot be reached ({why}); start Ray there (ray start --head), or unset it"]
    return []


def emulated_bf16(plan: RunPlan, cpu: Mapping[str, Any]) -> str | None:
    """Return a warning if roles run in bf16 on a CPU without bf16 instructions, else None."""
    names = [role.name for role in plan.roles().values() if role.model.dtype == "bf16"]
    if not names or any(cpu.get(capability) for capability in NATIVE_BF16):
        return None
    return (
        f"{', '.join(names)}: model_args.dtype is bf16, but this CPU has no bf16 instructions (AMX, AVX512-BF16) and"
        " emulates them; write fp32"
    )


def package_problems() -> list[str]:
    """Return errors if installed packages break the import of models or engines, or lack a library of the system.

    The broken packages are hidden in this process and its forks. They are an error nevertheless, because other
    processes import them: roles that are no forks, and on GPUs the one in which vLLM inspects a model.
    """
    broken = broken_companions()
    hide(broken)
    problems = missing_libraries()
    if not broken:
        return problems
    names, why = " ".join(broken), "; ".join(dict.fromkeys(broken.values()))
    return [
        *problems,
        f"installed packages do not match torch ({why}), so transformers and vLLM fail when they import these packages;"
        f" roll_opd does not need these packages, so uninstall them: {sys.executable} -m pip uninstall -y {names}",
    ]


def _lost_weights(plan: RunPlan) -> list[str]:
    """Return an error for each all-zero weight tensor in the models that Megatron loads."""
    paths = {role.model.path: name for name, role in reversed(plan.megatron_roles().items())}
    return [f"{name}: {sentence}" for path, name in paths.items() for sentence in lost_weights(read_model(Path(path)))]


def checkpoint_problems(plan: RunPlan, checkpoint: Checkpoint) -> list[str]:
    """Return an error for each model of the run that does not match the checkpoint.

    The student, the critic and the teachers that follow the student are compared. Their parallel layouts may differ
    from the layouts in the checkpoint.
    """
    problems = _shape_problems(plan.student, checkpoint.path / "hf", checkpoint)
    problems += _adapter_problems(plan.student.lora, checkpoint.path / ADAPTER, checkpoint)
    if plan.critic and not (checkpoint.path / CRITIC).is_dir():
        problems.append(
            f"resume_from_checkpoint: {checkpoint.path} has no critic, which adv_estimator: gae needs; give a"
            " checkpoint of a run with a critic, or start a new run with resume_from_checkpoint: false"
        )
    elif plan.critic:
        problems += _shape_problems(plan.critic, checkpoint.path / CRITIC / "hf", checkpoint)
    for teacher in plan.teachers:
        role = teacher.following
        if role is None or role.is_live or plan.serving(role) is not role:
            continue
        if not (checkpoint.path / FOLLOWERS / role.name).is_dir():
            problems.append(
                f"resume_from_checkpoint: {checkpoint.path} has no weights of {role.name}, which follows the student;"
                " give a checkpoint of a run in which that teacher followed, or start a new run with"
                " resume_from_checkpoint: false"
            )
    return problems


def _adapter_problems(lora: LoraPlan | None, saved: Path, checkpoint: Checkpoint) -> list[str]:
    found, wanted = (
        f"LoRA of rank {adapter.rank} on {','.join(sorted(adapter.targets))}" if adapter else "all weights"
        for adapter in (read_adapter(saved) if saved.is_dir() else None, lora)
    )
    if found == wanted:
        return []
    return [
        f"resume_from_checkpoint: {checkpoint.path} has trained {found}, but this run trains {wanted}; restore the"
        " former lora_rank and lora_target, or start a new run with resume_from_checkpoint: false"
    ]


def _shape_problems(learner: TrainPlan, saved_model: Path, checkpoint: Checkpoint) -> list[str]:
    saved, now = (read_model(path) for path in (saved_model, Path(learner.model.path)))
    different = [
        f"{name}: {getattr(saved, name)} in the checkpoint, {getattr(now, name)} in the model"
        for name in SHAPES
        if getattr(saved, name) != getattr(now, name)
    ]
    if not different:
        return []
    return [
        f"resume_from_checkpoint: {checkpoint.path} was trained from another model, not from {now.path}"
        f" ({'; '.join(different)}); give the other model, or start a new run with resume_from_checkpoint: false"
    ]


def open_data(plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> tuple[TaskSource, list[Prompt]]:
    """Open training prompts and demonstrations, and read the held-out prompts."""
    if (keys := task_keys(plan)).makes_tasks:
        return keys.open_tasks(plan)
    if plan.teachers and isinstance(source := plan.teachers[0].source, FilePlan):
        return _open_scored(plan, source, tokenizer)
    data_sets = {
        "training": plan.data,
        **({"validation": plan.validation.data} if plan.validation else {}),
        **({"demonstrations": plan.demonstrations.data} if plan.demonstrations else {}),
    }
    prompts = dict(zip(data_sets, _opened(list(data_sets.values()), tokenizer), strict=True))
    training, validation = prompts["training"], prompts.get("validation")
    if warning := miscounted(plan, len(training)):
        warn(warning)
    if plan.rollout:
        held_out_tags = validation.by_tag() if validation else {}
        workers = {term.worker for reward in plan.rewards for term in reward.terms}
        needing_truth = {worker for worker in workers if rewards.REWARDS.facts(worker).needs_ground_truth}
        check_coverage(
            plan.mode,
            plan.teachers,
            plan.rewards,
            training.by_tag(),
            held_out_tags,
            needing_truth,
            scored_by_workflow=plan.workflow is not None,
        )
    for warning in unused_warnings(_tagged(plan), {tag: None for every in prompts.values() for tag in every.by_tag()}):
        warn(warning)
    if validation:
        learned = [training, *([prompts["demonstrations"]] if plan.demonstrations else [])]
        if warning := overlap_warning(validation, learned):
            warn(warning)
    held_out = validation.all() if validation else []
    if plan.demonstrations:
        return MixedSource(training, prompts["demonstrations"], plan.seed), held_out
    return PromptSource(training, plan.seed), held_out


def _open_scored(
    plan: RunPlan, source: FilePlan, tokenizer: PreTrainedTokenizerBase
) -> tuple[TaskSource, list[Prompt]]:
    """Open training and held-out teacher files."""
    training = _scored(plan, plan.data, source, tokenizer)
    if warning := miscounted(plan, len(training)):
        warn(warning)
    held_out = _scored(plan, plan.validation.data, source, tokenizer).all() if plan.validation else []
    return PromptSource(training, plan.seed), held_out


def _scored(plan: RunPlan, data: DataPlan, source: FilePlan, tokenizer: PreTrainedTokenizerBase) -> ScoredSet:
    """Open and check teacher files. Raises a DataError with a list of the unusable rows."""
    student, objective = Path(plan.student.model.path), plan.objective
    expected = Expected(
        vocab_size=read_model(student).vocab,
        tokenizer=vocabulary_fingerprint(student),
        teacher=source.teacher or "",
        topk=objective.opd_topk if objective.opd_objective == "topk" else None,
    )
    rows, report = open_teacher_files(data, tokenizer, expected, source.compression)
    echo(report.summary())
    return rows


def _tagged(plan: RunPlan) -> dict[str, tuple[str, ...] | None]:
    """Return the tags of each template, teacher and reward, keyed by name. None stands for all tags."""
    return {
        **{f"tag_to_template.{tag}": (tag,) for tag in plan.data.tag_templates},
        **{f"teacher {teacher.name}": teacher.tags for teacher in plan.teachers},
        **{f"rewards.{reward.domain}": reward.tags for reward in plan.rewards},
    }


def _opened(data_sets: Sequence[DataPlan], tokenizer: PreTrainedTokenizerBase) -> list[PromptSet]:
    """Open every data set. If data sets have defects, raise a single DataError that lists all of them."""
    opened, refusals = [], []
    for data in data_sets:
        try:
            prompts, report = open_prompts(data, tokenizer)
        except DataError as error:
            refusals.append(str(error))
        else:
            opened.append(prompts)
            echo(report.summary())
            for warning in report.warnings:
                warn(warning)
    if refusals:
        raise DataError("\n".join(refusals))
    return opened


def miscounted(plan: RunPlan, usable: int) -> str | None:
    """Return a warning if max_steps does not fit num_train_epochs because some rows cannot be used.

    max_steps was computed from all rows of the files. `usable` is the number of rows that can be used.
    """
    if plan.epochs is None:
        return None
    steps = max(1, whole_steps(plan.epochs, usable, plan.rollout_batch_size))
    if steps == plan.max_steps:
        return None
    return (
        f"num_train_epochs: {plan.epochs:g} epochs over all rows of the files need max_steps={plan.max_steps}, but"
        f" only {usable} rows can be used; {plan.epochs:g} epochs over these rows need max_steps={steps}"
    )
