"""The plans of vLLM engines: the student's rollout, and a judge that runs here."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll_opd.config import memory
from roll_opd.config.examine import Checked
from roll_opd.config.frozen import FrozenDict
from roll_opd.config.plan import ModelPlan, RewardPlan, RolloutPlan, SamplingPlan
from roll_opd.config.roles import Role
from roll_opd.config.schema import GeneratingArgs, Run, Top, Worker

JUDGE_TOKENS = 1024  # of a judge's instructions, and of its answer where no max_new_tokens is written
JUDGE_SEQUENCES = 64  # that its memory is reckoned for


def environment(top: Run, worker: Worker | None = None) -> dict[str, str]:
    both = {**top.system_envs, **(worker.system_envs if worker else {})}
    return {name: str(value) for name, value in both.items()}


def rollout_plan(checked: Checked) -> RolloutPlan:
    """The student's engines."""
    top, role = checked.top, checked.roles.infer
    validation = top.validation.generating_args.max_new_tokens if top.validation else None
    needed = top.prompt_length + max(checked.response, validation or 0)
    engines = len(role.vllm.devices) // role.vllm.tp
    arguments = dict(role.vllm.args)
    if top.max_running_requests:  # what an engine does not run yet, it keeps waiting
        arguments.setdefault("max_num_seqs", -(-top.max_running_requests // engines))
    sampling = sampling_plan(role.worker.generating_args, checked.n, checked.response)
    return _engines(role, top, sampling, role.vllm.max_model_len or needed, arguments, top.max_running_requests)


def judge_plan(role: Role, checked: Checked) -> RolloutPlan:
    """A judge's engines. It reads the prompt and the response inside its own question, and its own last answer."""
    args = role.worker.generating_args
    new = args.max_new_tokens or JUDGE_TOKENS
    question = checked.top.prompt_length + 2 * checked.response + 2 * new + JUDGE_TOKENS
    length = role.vllm.max_model_len or min(question, role.facts.max_positions)
    sampling = sampling_plan(args, 1, new)
    if "temperature" not in args.model_fields_set:
        sampling = replace(sampling, temperature=0.0)
    return _engines(role, checked.top, sampling, length, role.vllm.args)


def judge_memory(checked: Checked, rewards: tuple[RewardPlan, ...]) -> dict[str, dict[str, int]]:
    """Estimated bytes a rank, by role name and part."""
    return {
        engine.name: memory.rollout_memory(
            checked.roles.judges[domain].facts, engine.tp, engine.model.dtype, engine.max_model_len, JUDGE_SEQUENCES
        )
        for domain, engine in ((reward.domain, reward.engine) for reward in rewards)
        if engine
    }


def _engines(
    role: Role,
    top: Top,
    sampling: SamplingPlan,
    max_model_len: int,
    arguments: Mapping[str, Any],
    max_running_requests: int | None = None,
) -> RolloutPlan:
    return RolloutPlan(
        name=role.path,
        model=ModelPlan(str(role.facts.path), role.dtype),
        devices=role.vllm.devices,
        tp=role.vllm.tp,
        engines=len(role.vllm.devices) // role.vllm.tp,
        sampling=sampling,
        max_model_len=max_model_len,
        engine_args=FrozenDict(arguments),
        max_running_requests=max_running_requests,
        env=FrozenDict(environment(top, role.worker)),
    )


def sampling_plan(args: GeneratingArgs, n: int, max_new_tokens: int) -> SamplingPlan:
    """Return the sampling plan of `generating_args`."""
    return SamplingPlan(
        n=n,
        max_new_tokens=max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k if args.top_k > 0 else -1,
        repetition_penalty=args.repetition_penalty,
        stop=args.stop_strings or (),
    )
