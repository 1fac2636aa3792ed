"""A stage: roles that start once and serve many runs, because starting them takes far longer than a short run.

A run is complete, from a command line to a run directory; only Ray and the roles already exist. Each run starts with
the initial weights and optimizer state of the roles.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from runs import REPOSITORY, SPREAD, Run, newest_run

from roll_opd.cluster import ray_runtime
from roll_opd.cluster.forkserver.forkserver_start import ForkServer, fork_server
from roll_opd.cluster.placement import Placement
from roll_opd.commands import run as launch
from roll_opd.config.plan import RunPlan, TeacherPlan
from roll_opd.pipelines import run_pipeline, start_roles
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.start_roles import start_reward_pools, start_workers
from roll_opd.planner.load_plan import load_plan
from roll_opd.teachers.scoring import Teacher
from roll_opd.teachers.views import SameTokens
from roll_opd.workers.reward_pool import RewardPool

PURE, WITH_TEACHER = ("demo", "onpolicy_distill"), ("demo", "rlvr_opd")
WITH_REWARD, WITH_CRITIC = ("demo", "rlvr"), ("demo", "ppo")
SHORT = (
    "deterministic=true",
    "rollout_batch_size=16",
    "num_return_sequences_in_group=4",
    "validation=null",
    "eval_steps=0",
    "save_steps=0",
    "logged_samples_per_step=64",
)


def optimizer_of(role: str) -> tuple[str, ...]:
    schedule = {"learning_rate": "3e-4", "warmup_steps": "0", "lr_scheduler_type": "constant"}
    settings = {**schedule, "gradient_accumulation_steps": "1"}
    return tuple(f"{role}.training_args.{name}={value}" for name, value in settings.items())


def frozen(name: str, model: str, devices: str, tp: int, *more: str) -> str:
    settings = (
        f"model_args: {{model_name_or_path: examples/demo/models/{model}, dtype: fp32}}",
        f'device_mapping: "{devices}"',
        f"strategy_args: {{strategy_name: megatron_infer, strategy_config: {{tensor_model_parallel_size: {tp}}}}}",
        "use_dynamic_batching_in_infer: true",
        "max_tokens_per_microbatch_in_infer: 12288",
        *more,
    )
    return f"++{name}={{{', '.join(settings)}}}"


TEACHER = frozen("teacher", "teacher", "[0,1]", 2)
REFERENCE = frozen("reference", "student", "[1]", 1)
CRITIC_SCHEDULE = "critic.training_args.lr_scheduler_type=constant"


class Stage:
    """All roles of `plan`; the plan of a run selects the roles that it uses. They remain for the next run."""

    def __init__(self, plan: RunPlan, place: Path, events: asyncio.AbstractEventLoop) -> None:
        self._plan, self.place, self._events = plan, place, events
        self.placement = Placement(plan.num_nodes, plan.devices_per_node)
        self.started: dict[str, tuple[RewardPool, ...]] = {}
        events.run_until_complete(self.reward_pools(plan, self.placement))
        self._workers = events.run_until_complete(start_workers(plan, self.placement))
        events.run_until_complete(self._workers.save(place / "start"))

    def run(
        self,
        *overrides: str,
        config: tuple[str, str],
        name: str = "staged",
        place: Path | None = None,
    ) -> Run:
        """Launch `config`; the names of its roles may differ, but not the settings of their workers."""
        place = place or self.place
        spread = SPREAD if config == PURE else ()
        command = ["--config_path", config[0], "--config_name", config[1], f"output_dir={place}", *spread, *overrides]
        code = self.launch([*command, f"exp_name={name}"])
        return Run(code, "", newest_run(place / name).resolve())

    def launch(self, arguments: Sequence[str]) -> int:
        """Launch a command line on the Ray cluster and roles of this stage, and return the exit code."""

        async def goes_on(_: RunWorkers) -> None:
            """Leave the roles for the next run."""

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "fork_server", lambda: nullcontext(ForkServer()))
            patch.setattr(ray_runtime, "ray_cluster", lambda *_: nullcontext())
            patch.setattr(run_pipeline, "Placement", lambda *_, **__: self.placement)
            patch.setattr(asyncio, "run", self._events.run_until_complete)
            patch.setattr(start_roles, "start_reward_pools", self.reward_pools)
            patch.setattr(start_roles, "start_workers", self.workers)
            patch.setattr(RunWorkers, "end", goes_on)
            return launch.main("a run on a stage", arguments=arguments)

    @property
    def first_weights(self) -> Path:
        """Return the student's weights before every run."""
        return self.place / "start/hf/model.safetensors"

    async def reward_pools(self, plan: RunPlan, placement: Placement) -> tuple[RewardPool, ...]:
        """Return the existing pools for this plan's rewards, or new ones."""
        settings = str([(reward.domain, reward.terms, reward.world_size) for reward in plan.rewards])
        if settings not in self.started:
            self.started[settings] = await start_reward_pools(plan, self.placement)
        for pool, reward in zip(self.started[settings], plan.rewards, strict=True):
            pool.plan = reward
            pool.drain_metrics()
        return self.started[settings]

    async def workers(self, plan: RunPlan, placement: Placement, answers: Path) -> RunWorkers:
        there, scorers = self._workers, self._workers.scorers
        for role in ("student", "reference", "critic"):
            wanted, found = (getattr(whole, role) for whole in (plan, self._plan))
            assert wanted is None or worker_settings(wanted) == worker_settings(found)
        await there.load(self.place / "start")
        await self._set_updates(plan)
        taking_part = RunWorkers(
            student=replace(there.student, plan=plan.student),
            sampler=there.sampler,
            scorers=replace(
                scorers,
                teachers=tuple(self._teacher(teacher) for teacher in plan.teachers),
                reference=scorers.reference if plan.reference else None,
            ),
            critic=replace(there.critic, plan=plan.critic) if plan.critic else None,
        )
        return await taking_part.for_objective(plan.objective)

    async def _set_updates(self, plan: RunPlan) -> None:
        """Give the engines a run's settings of weight updates; for a synchronous run, those of their start."""

        def change(worker: Any, on_update: str, deterministic: bool) -> None:
            worker._engine.updates._on_update, worker._engine._deterministic = on_update, deterministic

        of_engines = plan if plan.async_generation_ratio else self._plan
        assert of_engines.rollout
        engines = self._workers.sampler.engines.actors
        settings = of_engines.rollout.on_weight_update, of_engines.deterministic
        await asyncio.gather(*[engine.__ray_call__.remote(change, *settings) for engine in engines])

    def _teacher(self, plan: TeacherPlan) -> Teacher:
        """Return the started frozen role that has the settings of this teacher; it may be the reference policy."""
        started = ((self._plan.teachers[0].source, self._workers.scorers.teachers[0]),)
        started += ((self._plan.reference, self._workers.scorers.reference),)
        wanted = worker_settings(plan.source)
        (role,) = (role for worker, role in started if worker_settings(worker) == wanted)
        scorer = getattr(role, "scorer", role)  # of a teacher, or the reference policy itself
        return Teacher(plan, replace(scorer, name=plan.source.name), SameTokens(plan.name))


def worker_settings(plan: Any) -> dict[str, Any]:
    """Return the settings with which a role's processes were made: without the name, settings only for the driver, and
    lengths of runs."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    of_the_driver = ("name", "mini_batch_sequences", "critic_epochs", "critic_warmup")
    values = {name: value for name, value in values.items() if name not in of_the_driver}
    if "optimizer" in values:
        values["optimizer"] = replace(values["optimizer"], total_steps=1)
    return values


@contextmanager
def open_stage(place: Path) -> Iterator[Stage]:
    """Start Ray and every role that a run may have: student, sampler, rewards, critic, reference policy and teacher."""
    everyone = (TEACHER, REFERENCE, CRITIC_SCHEDULE, "use_opd=true", "opd_kl_coef=1", "use_kl_loss=true")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        users = place / "users"  # modules of a user's own, which every process finds
        users.mkdir()
        patch.setenv("PYTHONPATH", os.pathsep.join([str(users), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(users)
        longest = "prompt_length=1024"  # GSM8K's
        plan = load_plan(*WITH_CRITIC, [*SHORT, longest, *optimizer_of("actor_train"), *everyone], pure=False)
        # the runner cancels at its end what runs have left running, while Ray and the roles are there
        with fork_server() as server, ray_runtime.ray_cluster(plan.devices_per_node), asyncio.Runner() as runner:
            server.serve(plan)
            yield Stage(plan, place, runner.get_loop())
