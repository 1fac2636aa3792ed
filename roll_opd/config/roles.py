"""Puts together what is known of each role: its section, its model's facts, its devices and strategy.

A role is the student's training, the student's rollout, a teacher, the reference policy, or the critic. What could
not be read stays None, and the checks that need it are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roll_opd.config.errors import Findings
from roll_opd.config.models import ModelFacts, ModelFilesError, find_model, read_model
from roll_opd.config.plan import Mode
from roll_opd.config.schema import Top, Worker
from roll_opd.config.sections import CRITIC, MIXED_ROLES, PURE_ROLES, REFERENCE, Sections
from roll_opd.config.strategies import Megatron, Vllm, read_megatron, read_vllm
from roll_opd.config.tokenizers import has_tokenizer

Job = Literal["train", "score", "rollout"]


@dataclass
class Role:
    """One role; `path` is the dotted key of its section."""

    path: str
    job: Job
    worker: Worker
    facts: ModelFacts | None = None
    dtype: str = "bf16"
    megatron: Megatron | None = None
    vllm: Vllm | None = None

    @property
    def devices(self) -> tuple[int, ...] | None:
        strategy = self.megatron or self.vllm
        return strategy.devices if strategy else None


@dataclass
class Roles:
    """The roles of a run."""

    mode: Mode
    train: Role | None = None
    infer: Role | None = None
    teachers: dict[str, Role] = field(default_factory=dict)
    reference: Role | None = None
    critic: Role | None = None
    judges: dict[str, Role] = field(default_factory=dict)  # domain -> the engine that is its judge

    def placed(self) -> list[Role]:
        """Everyone who has devices."""
        return [*self.all(), *self.judges.values()]

    def all(self) -> list[Role]:
        """Everyone who reads the run's tokens."""
        found = (self.train, self.infer, *self.teachers.values(), self.reference, self.critic)
        return [role for role in found if role is not None]

    @property
    def shared_vocabulary(self) -> int:
        """How many token ids the student and all its teachers have; 0 where no model could be read."""
        facts = [role.facts for role in (self.train, *self.teachers.values()) if role is not None and role.facts]
        return min((known.vocab for known in facts), default=0)


def is_agentic(values: Mapping[str, Any]) -> bool:
    """Whether a configuration plays environments; ROLL tells by the script that is started."""
    environments = ("custom_envs", "train_env_manager", "val_env_manager")
    return values.get("pure_opd_pipeline_type") == "agentic" or any(values.get(key) for key in environments)


def choose_mode(values: Mapping[str, Any], sections: Sections, pure: bool | None, findings: Findings) -> Mode:
    """Return the mode. `pure` True: the caller runs pure distillation; None: tell from the configuration."""
    # the written values, since a wrong value elsewhere at the top must not change the mode
    is_pure, mixed = values.get("is_pure_opd") is True, values.get("use_opd") is True
    if mixed and (is_pure or pure):
        findings.problem("use_opd", "use_opd and pure distillation (is_pure_opd) exclude each other; choose one")
    if pure is None:
        pure = not mixed and any(role in sections.workers for role in PURE_ROLES)
    if is_pure or pure:
        return "pure"
    return "mixed" if mixed else "rl"


def read_roles(sections: Sections, mode: Mode, findings: Findings) -> Roles:
    """Return the roles of `mode`, with everything about them that could be read."""
    roles = Roles(mode)
    top = sections.top
    strict = top.strict_strategies if top else False
    train_name, infer_name = _role_names(sections, mode, findings)
    train = _section(sections, train_name, findings)
    cache: dict[str, ModelFacts | None] = {}
    if train is not None:
        path = train.model_args.model_name_or_path or sections.pretrain
        roles.train = megatron_role(train_name, "train", train, path, strict, cache, findings)
    infer = _section(sections, infer_name, findings)
    if infer is not None:
        from_train = train.model_args.model_name_or_path if train else None
        path = infer.model_args.model_name_or_path or from_train or sections.pretrain
        role = Role(infer_name, "rollout", infer, vllm=read_vllm(infer, infer_name, strict, findings))
        role.facts = _facts(role.path, path, cache, findings)
        role.dtype = infer.model_args.dtype or (roles.train.dtype if roles.train else "bf16")
        roles.infer = role
    if mode != "rl":
        if not sections.teachers:
            findings.problem("teacher", "is missing; write a teacher section with its own model_name_or_path")
        for name, worker in sections.teachers.items():
            if worker is not None:
                path = sections.teacher_paths[name]
                model = worker.model_args.model_name_or_path
                roles.teachers[name] = megatron_role(path, "score", worker, model, strict, cache, findings, roles.train)
    elif sections.teachers:
        findings.warn("teacher: is written but not used; set use_opd: true to distil from it")
    from_train = train.model_args.model_name_or_path if train else None
    student = from_train or sections.pretrain
    roles.reference = _reference(sections, mode, student, strict, cache, findings, roles.train)
    roles.critic = _critic(sections, mode, student, strict, cache, findings, roles.train)
    for domain, worker in sections.judges.items():
        if worker is not None:
            path = f"rewards.{domain}"
            role = Role(path, "rollout", worker, vllm=read_vllm(worker, path, strict, findings))
            role.facts = _facts(path, worker.model_args.model_name_or_path, cache, findings)
            role.dtype = worker.model_args.dtype or "bf16"
            roles.judges[domain] = role
    return roles


def reference_user(top: Top | None, mode: Mode) -> str | None:
    """Return the key that needs a reference policy, None if nothing does."""
    if top is None or mode == "pure":
        return None
    return "use_kl_loss" if top.use_kl_loss else "add_token_level_kl" if top.add_token_level_kl else None


def _reference(
    sections: Sections,
    mode: Mode,
    student: str | None,
    strict: bool,
    cache: dict[str, ModelFacts | None],
    findings: Findings,
    trained: Role | None,
) -> Role | None:
    """Return the frozen reference policy: by default the student as it is before training."""
    user = reference_user(sections.top, mode)
    if REFERENCE not in sections.workers:
        if user:
            findings.problem(
                user, f"true needs a reference policy; write a reference section, or set {user}: false to do without"
            )
        return None
    if user is None:
        findings.warn(
            "reference: is written but not used; only use_kl_loss and add_token_level_kl compare with it, so it is"
            " not loaded"
        )
        return None
    worker = sections.workers[REFERENCE]
    if worker is None:
        return None
    model = worker.model_args.model_name_or_path or student
    return megatron_role(REFERENCE, "score", worker, model, strict, cache, findings, trained)


def needs_critic(top: Top | None, mode: Mode) -> bool:
    """Whether advantages come from a critic's values; gae is ROLL's default."""
    return top is not None and mode != "pure" and top.adv_estimator in (None, "gae")


def _critic(
    sections: Sections,
    mode: Mode,
    student: str | None,
    strict: bool,
    cache: dict[str, ModelFacts | None],
    findings: Findings,
    trained: Role | None,
) -> Role | None:
    """Return the critic: by default it begins as the student does."""
    needed = needs_critic(sections.top, mode)
    if CRITIC not in sections.workers:
        if needed:
            findings.problem(
                "adv_estimator",
                "gae (ROLL's default) needs a critic; write a critic section (training_args, strategy_args,"
                " device_mapping), or use grpo or reinforce",
            )
        return None
    if not needed:
        findings.warn("critic: is written but not used; only adv_estimator: gae needs values, so it is not loaded")
        return None
    worker = sections.workers[CRITIC]
    if worker is None:
        return None
    model = worker.model_args.model_name_or_path or student
    return megatron_role(CRITIC, "train", worker, model, strict, cache, findings, trained)


def _role_names(sections: Sections, mode: Mode, findings: Findings) -> tuple[str, str]:
    """Return what the student's two roles are called: an RLVR file made pure by a switch keeps its actor_* names."""
    wrong, right = (MIXED_ROLES, PURE_ROLES) if mode == "pure" else (PURE_ROLES, MIXED_ROLES)
    if mode == "pure" and not sections.workers.keys() & set(PURE_ROLES):
        return MIXED_ROLES if sections.workers.keys() & set(MIXED_ROLES) else PURE_ROLES
    for written, expected in zip(wrong, right, strict=True):
        if written in sections.workers:
            mode_name = "pure distillation" if mode == "pure" else f"mode {mode!r}"
            findings.problem(written, f"{mode_name} names this role {expected!r}; rename it")
    return right


def _section(sections: Sections, name: str, findings: Findings) -> Worker | None:
    if name not in sections.workers:
        findings.problem(name, "is missing; write this role's section")
        return None
    return sections.workers[name]


def megatron_role(
    path: str,
    job: Job,
    worker: Worker,
    model: str | None,
    strict: bool,
    cache: dict[str, ModelFacts | None],
    findings: Findings,
    trained: Role | None = None,
) -> Role:
    """Return a role of Megatron's with everything about it that could be read; `cache` holds the models read so far."""
    student = trained.megatron if trained else None
    role = Role(path, job, worker, megatron=read_megatron(worker, path, job, strict, findings, student))
    role.facts = _facts(path, model, cache, findings)
    written = worker.model_args.dtype
    from_strategy = role.megatron.dtype if role.megatron else None
    if written and from_strategy and written != from_strategy:
        findings.problem(
            f"{path}.strategy_args.strategy_config.{from_strategy}",
            f"true contradicts {path}.model_args.dtype {written}; keep one of them",
        )
    role.dtype = written or from_strategy or "bf16"
    _block_adapters(role, findings)
    return role


def _block_adapters(role: Role, findings: Findings) -> None:
    """Running without these would train something else than the user asked for."""
    args = role.worker.model_args
    written = {
        "lora_target": args.lora_target,
        "adapter_name_or_path": args.adapter_name_or_path,
        "freeze_module_prefix": args.freeze_module_prefix,
    }
    for key, value in written.items():
        if value:
            findings.block(
                f"{role.path}.model_args.{key}",
                "LoRA adapters and frozen modules are not available yet; remove the key to train all weights",
            )


def _facts(path: str, model: str | None, cache: dict[str, ModelFacts | None], findings: Findings) -> ModelFacts | None:
    key = f"{path}.model_args.model_name_or_path"
    if model is None:
        findings.problem(
            key,
            f"is missing; {path} needs the path of its own model (no other role's model is put in its place)",
        )
        return None
    if model not in cache:
        cache[model] = None
        try:
            facts = cache[model] = read_model(find_model(model))
        except ModelFilesError as error:
            findings.problem(key, str(error))
            return None
        if not has_tokenizer(facts.path):
            findings.block(
                key,
                f"{facts.path} has no tokenizer files (tokenizer.json), so this can be planned but not run;"
                " put the files of the model's release there",
            )
        if not facts.weight_files:
            findings.block(
                key,
                f"{facts.path} has no weights (model.safetensors or its index), so this can be planned but not run;"
                " put the weights there",
            )
    return cache[model]
