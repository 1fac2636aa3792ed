"""From a user's configuration to a `RunPlan`: compose, validate, check everything, then freeze.

`load_plan` is the one entry. It starts nothing and writes nothing. It asks in the order in which a user thinks: roles,
models, layouts, devices, lengths, batches, data, output. Everything that can be checked is, so that all problems come
out together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roll_opd.algorithms.registry import POLICY_LOSSES, AlgorithmError
from roll_opd.algorithms.table import KL_LOSS_COEF, algorithm, loss_facts
from roll_opd.config import check_files, check_layouts, check_objective, check_values, parts
from roll_opd.config.check_packages import gpu_memory_gb, unavailable
from roll_opd.config.check_samples import check_samples
from roll_opd.config.errors import ConfigError, Diagnostics
from roll_opd.config.expand import expand, pipeline_problem
from roll_opd.config.foreign import off_policy_problem, rollout_only_problem, vision_problem
from roll_opd.config.load import LoadedConfig, load_config, write_yaml
from roll_opd.config.plan import (
    CheckpointPlan,
    DataPlan,
    DemonstrationPlan,
    ObjectivePlan,
    RewardPlan,
    RunPlan,
    ValidationPlan,
)
from roll_opd.config.read import MIXED_ROLES, PURE_ROLES, read_sections
from roll_opd.config.rewards import read_rewards
from roll_opd.config.roles import Role, RoleReader, Roles, choose_mode, is_agentic
from roll_opd.config.schema import (
    SUPERVISED,
    CheckpointKeys,
    DataArgs,
    RolloutKeys,
    Run,
    RunKeys,
    Supervised,
    SupervisedWorker,
    Top,
    keys_of,
    shared,
)
from roll_opd.config.trackers import read_trackers
from roll_opd.config.variants import read_variant
from roll_opd.data.preview import count_rows, first_tags, whole_steps
from roll_opd.data.rows import DataError
from roll_opd.extensions import users_module
from roll_opd.frozen import FrozenDict
from roll_opd.megatron.memory import estimate_memory
from roll_opd.paths import looking_beside
from roll_opd.tracking.secrets import without_secrets

TITLES = {
    "pure": "pure on-policy distillation",
    "mixed": "on-policy distillation with a reward",
    "rl": "reinforcement learning",
}
AGENTIC_SECTIONS = ("custom_envs", "train_env_manager", "val_env_manager", "reward_normalization")


def load_plan(
    config_path: str,
    config_name: str,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    pure: bool | None = None,
    pipeline: str | None = None,
    runnable: bool = True,
) -> RunPlan:
    """Return the plan of a run, or raise ConfigError with every problem that could be found.

    `config_path` is a directory, looked for in `load.config_places`, `config_name` a YAML file in it.
    `pure` True: pure distillation (start_onpolicy_distill_pipeline.py runs it); False: the RLVR entry, where `use_opd`
    decides. `pipeline`: a supervised one, as start_sft_pipeline.py and start_dpo_pipeline.py run, or a dotted path.
    Where both are None, the configuration tells. `runnable` False also plans what cannot be run yet, and says so in
    `warnings`.

    Relative paths inside a configuration are relative to the current directory, as in ROLL; what is not found there is
    looked for beside the configuration's file, then in the repository (the parent of `examples/`).
    """
    loaded = load_config(config_path, config_name, list(overrides))
    with looking_beside(loaded.directory):
        return plan_config(loaded, pure=pure, pipeline=pipeline, runnable=runnable)


def plan_config(
    loaded: LoadedConfig, *, pure: bool | None = None, pipeline: str | None = None, runnable: bool = True
) -> RunPlan:
    """Return the plan of an already composed configuration; see `load_plan`."""
    diagnostics = Diagnostics(loaded.origins)
    if hopeless := vision_problem(loaded.values) or off_policy_problem(loaded.values):
        raise ConfigError([hopeless])  # everything else would be said about something that cannot run at all
    keys = _supervised_pipeline(loaded.values, pure, pipeline)
    planner = _Planner(loaded, diagnostics)
    plan = planner.supervised(keys) if keys else planner.rolled_out(pure)
    if plan is None or diagnostics.problems:
        found = [*diagnostics.problems, *(diagnostics.blockers if runnable else ())]
        raise ConfigError(found or ["the configuration could not be read"])
    sentences = [*diagnostics.blockers, *unavailable(plan)]
    if sentences and runnable:
        raise ConfigError(sentences)
    return replace(plan, warnings=(*diagnostics.warnings, *sentences))


def _supervised_pipeline(values: Mapping[str, Any], pure: bool | None, pipeline: str | None) -> type[Supervised] | None:
    """Return the keys of the supervised pipeline that is asked for or meant; None: a run that rolls out."""
    if pipeline is not None:
        problem = f"no pipeline {pipeline!r}; known: distill, rlvr, {', '.join(SUPERVISED)}, or a module's dotted path"
        try:
            if pipeline not in SUPERVISED:
                users_module(pipeline)  # declares its keys
            return SUPERVISED[pipeline]
        except (ImportError, KeyError) as error:
            raise ConfigError([problem + (f": {error}" if isinstance(error, ImportError) else "")]) from None
    if pure is not None:
        return None
    by_role = {keys.role: keys for keys in SUPERVISED.values() if keys.role not in (*PURE_ROLES, *MIXED_ROLES)}
    for keys in (*[by_role[role] for role in by_role if role in values], *SUPERVISED.values()):
        is_meant = values.get("algorithm_type") == keys.algorithm or not keys.own_keys.isdisjoint(values)
        if is_meant or (keys.role in by_role and keys.role in values):
            return keys
    return None


@dataclass(frozen=True)
class _Planner:
    """Reads, checks and builds one configuration."""

    loaded: LoadedConfig
    diagnostics: Diagnostics

    def rolled_out(self, pure: bool | None) -> RunPlan | None:
        """Return the plan of a run that rolls out; None, or with problems reported, where it cannot be one."""
        values, diagnostics = self.loaded.values, self.diagnostics
        hopeless = pipeline_problem(values, diagnostics)
        if is_agentic(values):
            hopeless = hopeless or rollout_only_problem(values)
        if hopeless:
            raise ConfigError([hopeless])
        sections = read_sections(values, self.loaded.variables, None, diagnostics)
        if isinstance(sections.top, Top):
            repeats = any(w.generating_args.num_return_sequences for w in sections.workers.values() if w)
            variant = read_variant(sections.top, sections.workers, diagnostics)
            sections.top = expand(sections.top, repeats, variant, diagnostics)
        top = sections.top
        mode = choose_mode(values, sections, pure, diagnostics)
        roles = RoleReader(sections, mode, diagnostics).rolled_out()
        check_layouts.check_roles(roles.placed(), diagnostics)
        allow_self_teacher = isinstance(top, Top) and top.allow_self_teacher
        tokenizer_check = top.teacher_tokenizer_check if isinstance(top, Top) else "strict"
        check_files.compare_models(roles, allow_self_teacher, diagnostics, tokenizer_check)
        if not isinstance(top, Top):
            return None
        agentic = is_agentic(values)
        if agentic:
            top = check_values.turn_lengths(top, roles.infer)
        check_objective.check_objective(top, mode, diagnostics)
        check_objective.check_topk(top, roles.shared_vocabulary, diagnostics)
        check_layouts.check_devices(roles.placed(), top, diagnostics)
        sizes = check_values.read_sizes(top, roles, agentic, diagnostics)
        check_objective.check_groups(top, mode, sizes.n, agentic, diagnostics)
        check_samples(top, sizes.n, agentic, bool(sections.rewards), diagnostics)
        rows = self._prompts(top, roles, mode, bool(sections.rewards), agentic)
        given = self._demonstrations(top, top.prompt_length + (sizes.response or 0), agentic)
        rewards = read_rewards(sections.rewards, mode, 0 if agentic else sizes.n, diagnostics)
        check_objective.check_rewards(top, mode, rewards, diagnostics)
        if mode != "pure" and not agentic and not sections.rewards:
            switch = "use_opd: true" if mode == "mixed" else "a run without a teacher"
            diagnostics.problem(
                "rewards", f"is missing; {switch} learns from rewards, write at least rewards.math_rule"
            )
        if None not in sections.rewards.values():
            rows = self._mixed(rows, roles, rewards)
            if None not in sections.teachers.values():
                tags = {role.path: role.worker.tag_included or None for role in roles.teachers.values()}
                check_files.check_tags(mode, tags, rewards, *rows, diagnostics)
        common = self._common(top, roles)
        if diagnostics.problems:
            return None
        return self._assembled(top, roles, common, sizes, (*rows, given), rewards, agentic)

    def _assembled(
        self,
        top: Top,
        roles: Roles,
        common: dict[str, Any],
        sizes: check_values.Sizes,
        rows: tuple[DataPlan | None, DataPlan | None, DataPlan | None],
        rewards: tuple[RewardPlan, ...],
        agentic: bool,
    ) -> RunPlan:
        """Return the plan of a run that rolls out; `rows` to learn from, held out, and demonstrations."""
        diagnostics, n, (data, validation, given) = self.diagnostics, sizes.n, rows
        assert roles.train and roles.infer and data and sizes.response and sizes.mini_batch
        longest, sequences = top.prompt_length + sizes.response, top.rollout_batch_size * n
        samples, demonstrations = sizes.mini_batch, None  # of an update
        if given is not None:
            each = check_values.demonstration_rows(samples, top.expert_data_ratio or 0.0)
            samples -= each
            demonstrations = DemonstrationPlan(given, each, updates=sequences // samples)
        # agentic runs may leave a remainder, which is one more update
        updates = top.ppo_epochs * -(-sequences // samples)
        critic = None
        if roles.critic and sizes.critic_mini_batch:
            total = top.max_steps * top.critic_epochs * -(-sequences // sizes.critic_mini_batch)
            critic = parts.critic_plan(roles.critic, top, sizes.critic_mini_batch, longest, total, diagnostics)
        total = updates * (top.max_steps - (critic.critic_warmup if critic else 0))
        engines = {domain: parts.judge_plan(role, top, sizes.response) for domain, role in roles.judges.items()}
        held_out = None
        if top.validation and validation:
            args, new = top.validation.generating_args, sizes.held_out or sizes.response
            sampling = parts.sampling_plan(args, args.num_return_sequences or 1, new)
            held_out = ValidationPlan(validation, sampling, top.validation.measure_teacher)
        vocabulary = roles.train.info.vocab if roles.train.info else None
        plan = RunPlan(
            **common,
            **shared(RolloutKeys, top),
            mode=roles.mode,
            pipeline="agentic" if agentic else "rlvr",
            title=TITLES[roles.mode],
            max_steps=top.max_steps,
            student=parts.train_plan(roles.train, top, sizes.mini_batch, longest, total, diagnostics),
            rollout=parts.rollout_plan(roles.infer, top, n, sizes.response, sizes.held_out or 0),
            teachers=tuple(
                parts.teacher_plan(name, role, top, longest, diagnostics, vocabulary)
                for name, role in roles.teachers.items()
            ),
            rewards=tuple(replace(reward, engine=engines.get(reward.domain)) for reward in rewards),
            data=data,
            objective=parts.objective_plan(top, roles.mode, updates, sizes.response, roles.shared_vocabulary),
            reference=parts.megatron_plan(roles.reference, top, longest, diagnostics, vocabulary)
            if roles.reference
            else None,
            critic=critic,
            demonstrations=demonstrations,
            extra_prompts=top.max_additional_running_prompts if top.is_use_additional_prompts else 0,
            agentic=FrozenDict({key: getattr(top, key) for key in AGENTIC_SECTIONS}) if agentic else None,
            validation=held_out,
        )
        return self._finished(plan, top, roles, longest, bool(held_out or agentic))

    def supervised(self, keys: type[Supervised]) -> RunPlan | None:
        """Return the plan of a run over rows with answers: no rollout, no reward."""
        diagnostics, values = self.diagnostics, self.loaded.values
        sections = read_sections(values, self.loaded.variables, keys, diagnostics)
        top = sections.top
        roles = RoleReader(sections, keys.pipeline, diagnostics).supervised(keys)
        train = roles.train
        if not isinstance(top, Supervised) or train is None:
            return None
        check_layouts.check_roles(roles.placed(), diagnostics)
        check_files.compare_models(roles, False, diagnostics)
        check_layouts.check_devices(roles.placed(), top, diagnostics)
        longest = top.sequence_length
        check_values.check_positions(roles.all(), longest, str(longest), "sequence_length", diagnostics)
        args, path = train.worker.data_args, f"{train.path}.data_args"
        data, validation = self._rows(top, args, path), None
        if top.validation is not None:
            validation = self._rows(top, top.validation.data_args, "validation.data_args", args)
        if data is not None:
            data = replace(data, streams=check_files.read_streams(args, path, data, (), diagnostics))
        objective = self._supervised_objective(top)
        common = self._common(top, roles)
        check_values.check_micro_batches(roles.all(), longest, diagnostics, answers=keys.answers)
        rows, update = check_values.rows_per_step(top, train, diagnostics)
        steps, epochs = self._steps(top, train, data, rows)
        if diagnostics.problems or data is None:
            return None
        vocabulary = train.info.vocab if train.info else None
        total, own = steps * (rows // update), sorted(keys_of(keys).keys() - keys_of(Supervised))
        plan = RunPlan(
            **common,
            mode=keys.pipeline,
            pipeline=keys.pipeline,
            pipeline_args=FrozenDict({key: getattr(top, key) for key in own}),
            title=keys.title,
            max_steps=steps,
            rollout_batch_size=rows,
            student=parts.train_plan(train, top, update * keys.answers, longest, total, diagnostics, keys.answers),
            data=data,
            objective=objective,
            reference=parts.megatron_plan(roles.reference, top, longest, diagnostics, vocabulary)
            if roles.reference
            else None,
            epochs=epochs,
            validation=ValidationPlan(validation) if validation else None,
            samples_per_step=0,
        )
        return self._finished(plan, top, roles, longest, validation is not None)

    def _common(self, top: Run, roles: Roles) -> dict[str, Any]:
        """Check what every pipeline has, and return the plan's fields for it."""
        exp_name = top.exp_name or self.loaded.name
        output_dir = check_files.check_output(
            top, exp_name, roles.train.info if roles.train else None, self.diagnostics
        )
        trackers = read_trackers(top, self.diagnostics)
        resume = check_files.read_resume(top, self.diagnostics)
        self.diagnostics.warn_ignored()
        return {
            **shared(RunKeys, top),
            "output_dir": output_dir,
            "exp_name": exp_name,
            "num_nodes": check_layouts.nodes(roles.placed(), top),
            "devices_per_node": top.num_gpus_per_node,
            "checkpoint": CheckpointPlan(**shared(CheckpointKeys, top), resume=resume),
            "trackers": tuple(trackers),
            "tracker_args": FrozenDict(trackers),
            "env": parts.environment(top),
        }

    def _finished(self, plan: RunPlan, top: Run, roles: Roles, longest: int, validates: bool) -> RunPlan:
        models = {role.path: role.info for role in roles.placed() if role.info}
        finished = replace(
            plan,
            eval_steps=top.eval_steps if validates else 0,
            device_memory_gb=top.device_memory_gb or gpu_memory_gb(),
            memory=FrozenDict(estimate_memory(plan, models, longest)),
            config_yaml=write_yaml(without_secrets(self.loaded.values)),
        )
        check_layouts.check_memory(finished, self.diagnostics)
        return finished

    def _prompts(
        self, top: Top, roles: Roles, mode: str, has_rewards: bool, agentic: bool
    ) -> tuple[DataPlan | None, DataPlan | None]:
        """Return the prompts to learn from, and the held-out ones."""
        if agentic:
            return DataPlan((), top.prompt_length), None  # environments make their own prompts
        data = validation = training = None
        if roles.train:
            training, path = roles.train.worker.data_args, f"{roles.train.path}.data_args"
            data = check_files.read_data(training, path, top, top.prompt_length, self.diagnostics)
        if top.validation and has_rewards:
            args, path = top.validation.data_args, "validation.data_args"
            validation = check_files.read_data(args, path, top, top.prompt_length, self.diagnostics, training)
        elif top.validation and mode == "pure":
            self.diagnostics.warn(
                "validation: is left out, there is no reward to score the answers; write rewards.math_rule"
            )
        return data, validation

    def _mixed(
        self, rows: tuple[DataPlan | None, DataPlan | None], roles: Roles, rewards: tuple[RewardPlan, ...]
    ) -> tuple[DataPlan | None, DataPlan | None]:
        """Return `rows` with the streams that the first of them are drawn from."""
        data, validation = rows
        if data is None or not data.files or roles.train is None:
            return rows
        args, path = roles.train.worker.data_args, f"{roles.train.path}.data_args"
        streams = check_files.read_streams(args, path, data, rewards, self.diagnostics)
        return replace(data, streams=streams), validation

    def _demonstrations(self, top: Top, length: int, agentic: bool) -> DataPlan | None:
        """Return where demonstrations come from; `length` is the most tokens of prompt and answer."""
        diagnostics, path = self.diagnostics, "demonstrations.data_args"
        loss, share = top.policy_loss or "ppo", top.expert_data_ratio
        if top.demonstrations is None:
            if share:
                diagnostics.problem(
                    "demonstrations",
                    f"is missing; policy loss {loss} learns a share of each batch (expert_data_ratio {share:g}) from"
                    f" demonstrations, rows with answers; write {path}.file_name",
                )
            return None
        if not share:
            if loss_facts(loss).needs != "demonstrations":  # else the share is what is wrong, and told so
                diagnostics.problem(
                    "demonstrations",
                    f"is written, but policy loss {loss} learns nothing from it; use algorithm_type mix or mix_chord,"
                    " or remove the section",
                )
            return None
        if agentic:
            diagnostics.block(
                "demonstrations", "joins the answers to prompts, not yet the trajectories of environments; remove it"
            )
            return None
        args = top.demonstrations.data_args
        data = check_files.read_data(args, path, top, length, diagnostics)
        if data is None:
            return None
        data = check_files.with_answers(data, top.demonstrations, "sft", "prompt_length + response_length")
        if not first_tags(data)[0]:
            files = ", ".join(data.files)
            diagnostics.problem(f"{path}.file_name", f"no row can be read in {files}; give rows with answers")
            return None
        return replace(data, streams=check_files.read_streams(args, path, data, (), diagnostics))

    def _rows(self, top: Supervised, args: DataArgs, path: str, training: DataArgs | None = None) -> DataPlan | None:
        data = check_files.read_data(args, path, top, top.sequence_length, self.diagnostics, training)
        return data and check_files.with_answers(data, top, top.schema, "sequence_length")

    def _supervised_objective(self, top: Supervised) -> ObjectivePlan:
        diagnostics, name = self.diagnostics, top.algorithm_type or top.algorithm
        objective = ObjectivePlan(paired=top.answers == 2, kl_loss="k2", gamma=0.0)
        try:
            row = algorithm(name)
            loss = POLICY_LOSSES.located(row.policy_loss)
        except AlgorithmError as error:
            diagnostics.problem("algorithm_type", str(error))
            return objective
        if row.schema != top.schema:
            reads = f"and this pipeline reads {top.schema}"
            diagnostics.problem("algorithm_type", f"{name} learns from rows of schema {row.schema}, {reads}")
        for key, sentence in top.refusals().items():
            diagnostics.block(key, sentence)
        arguments = {key: value for key in top.loss_arguments if (value := getattr(top, key)) is not None}
        own = loss_facts(row.policy_loss).loss_agg_mode
        kl_loss_coef = getattr(top, "kl_loss_coef", None)
        if kl_loss_coef is None:  # a row of Trinity-RFT's has its KL loss where it is named; ROLL's DPO has none
            kl_loss_coef = KL_LOSS_COEF if top.algorithm_type and row.kl_loss and top.has_reference else 0.0
        if own and top.loss_agg_mode not in (None, own):
            diagnostics.problem(
                "loss_agg_mode",
                f"policy loss {row.policy_loss} is one number a pair; {top.loss_agg_mode} would weigh pairs by their"
                f" length; use {own}",
            )
        return replace(
            objective,
            policy_loss=loss,
            policy_loss_args=FrozenDict({**row.policy_loss_args, **arguments}),
            kl_loss_coef=kl_loss_coef,
            loss_agg_mode=top.loss_agg_mode or own or row.loss_agg_mode,
            loss_normaliser=float(top.sequence_length),
        )

    def _steps(self, top: Supervised, train: Role, data: DataPlan | None, rows: int) -> tuple[int, float | None]:
        """Return max_steps, or as many as num_train_epochs take, and those epochs where they were counted."""
        diagnostics = self.diagnostics
        assert isinstance(train.worker, SupervisedWorker)
        epochs, key = train.worker.training_args.num_train_epochs, f"{train.path}.training_args.num_train_epochs"
        if top.max_steps is not None and top.max_steps > 0:
            if epochs:
                diagnostics.warn(f"{key}: {epochs:g} has no effect beside max_steps {top.max_steps}")
            return top.max_steps, None
        if not epochs:
            diagnostics.problem("max_steps", f"is missing; write it, or {key}")
        elif data is not None:
            try:
                found = count_rows(data)
            except DataError as error:
                diagnostics.problem(f"{train.path}.data_args.file_name", str(error))
                return 1, None
            if steps := whole_steps(epochs, found, rows):
                return steps, epochs
            few = f"{epochs:g} epochs of {found} rows are less than one step of {rows}; write max_steps"
            diagnostics.problem(key, few)
        return 1, None
