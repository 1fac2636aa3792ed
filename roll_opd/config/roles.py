"""Puts together what is known of each role: its section, its model's files, its devices and strategy.

A role is the student's training, the student's rollout, a teacher, the reference policy, the critic, or a judge that
runs here. What could not be read stays None, and the checks that need it are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roll_opd.config.errors import Diagnostics
from roll_opd.config.read import CRITIC, MIXED_ROLES, PURE_ROLES, REFERENCE, Sections
from roll_opd.config.schema import Dtype, Supervised, Top, Worker
from roll_opd.config.strategies import Megatron, Vllm, read_megatron, read_vllm
from roll_opd.hf.model_info import ModelFilesError, ModelInfo, find_model, read_model
from roll_opd.hf.tokenizer_files import has_tokenizer
from roll_opd.hf.weight_files import holds_decoder, weight_problems

ADAPTER_KEYS = ("lora_target", "lora_rank", "adapter_name_or_path", "freeze_module_prefix")
Job = Literal["train", "frozen", "rollout"]


@dataclass
class Role:
    """One role; `path` is the dotted key of its section."""

    path: str
    job: Job
    worker: Worker
    info: ModelInfo | None = None
    dtype: Dtype = "bf16"
    megatron: Megatron | None = None
    vllm: Vllm | None = None

    @property
    def devices(self) -> tuple[int, ...] | None:
        strategy = self.megatron or self.vllm
        return strategy.devices if strategy else None


@dataclass
class Roles:
    """The roles of a run."""

    mode: str
    train: Role | None = None
    infer: Role | None = None
    teachers: dict[str, Role] = field(default_factory=dict)
    reference: Role | None = None
    critic: Role | None = None
    judges: dict[str, Role] = field(default_factory=dict)  # domain -> the engine that is its judge

    def placed(self) -> list[Role]:
        """Return every role that has devices."""
        return [*self.all(), *self.judges.values()]

    def all(self) -> list[Role]:
        """Return every role that reads the run's tokens."""
        found = (self.train, self.infer, *self.teachers.values(), self.reference, self.critic)
        return [role for role in found if role is not None]

    @property
    def shared_vocabulary(self) -> int:
        """How many token ids the student and all its teachers have; 0 where no model could be read."""
        models = [role.info for role in (self.train, *self.teachers.values()) if role is not None and role.info]
        return min((known.vocab for known in models), default=0)


def is_agentic(values: Mapping[str, Any]) -> bool:
    """Whether a configuration plays environments; ROLL tells by the script that is started."""
    environments = ("custom_envs", "train_env_manager", "val_env_manager")
    return values.get("pure_opd_pipeline_type") == "agentic" or any(values.get(key) for key in environments)


def choose_mode(values: Mapping[str, Any], sections: Sections, pure: bool | None, diagnostics: Diagnostics) -> str:
    """Return the mode. `pure` True: the caller runs pure distillation; None: tell from the configuration."""
    # the written values, since a wrong value elsewhere at the top must not change the mode
    is_pure, mixed = values.get("is_pure_opd") is True, values.get("use_opd") is True
    if mixed and (is_pure or pure):
        diagnostics.problem("use_opd", "use_opd and pure distillation (is_pure_opd) exclude each other; choose one")
    if pure is None:
        pure = not mixed and any(role in sections.workers for role in PURE_ROLES)
    if is_pure or pure:
        return "pure"
    return "mixed" if mixed else "rl"


class RoleReader:
    """Reads the roles of one configuration; each model directory is read once."""

    def __init__(self, sections: Sections, mode: str, diagnostics: Diagnostics) -> None:
        self._sections, self._mode, self._diagnostics = sections, mode, diagnostics
        self._strict = bool(sections.top and sections.top.strict_strategies)
        self._models: dict[str, ModelInfo | None] = {}
        self._checked: set[Path] = set()  # models whose weights were held against config.json
        self._roles = Roles(mode)
        self._student: str | None = None

    def supervised(self, pipeline: type[Supervised]) -> Roles:
        """Return the roles of a pipeline that learns from rows."""
        self._read_student(pipeline.role)
        if pipeline.has_reference and self._roles.train is not None:
            worker = self._sections.workers.get(REFERENCE) or Worker()
            self._roles.reference = self._reference(worker)
        self._refuse_adapters()
        return self._roles

    def rolled_out(self) -> Roles:
        """Return the roles of a run that rolls out, as its mode has them."""
        sections, roles, diagnostics = self._sections, self._roles, self._diagnostics
        train_name, infer_name = self._student_names()
        self._read_student(train_name)
        infer = self._section(infer_name)
        if infer is not None:
            model = infer.model_args.model_name_or_path or self._student
            roles.infer = self._engine(infer_name, infer, model, roles.train.dtype if roles.train else "bf16")
        if self._mode != "rl":
            if not sections.teachers:
                diagnostics.problem("teacher", "is missing; write a teacher section with its own model_name_or_path")
            for name, worker in sections.teachers.items():
                if worker is not None:
                    path = sections.teacher_paths[name]
                    roles.teachers[name] = self._megatron(path, "frozen", worker, worker.model_args.model_name_or_path)
        elif sections.teachers:
            diagnostics.warn("teacher: is written but not used; set use_opd: true to distil from it")
        self._read_reference()
        self._read_critic()
        for domain, worker in sections.judges.items():
            if worker is not None:
                model = worker.model_args.model_name_or_path
                roles.judges[domain] = self._engine(f"rewards.{domain}", worker, model, "bf16")
        self._refuse_adapters()
        return roles

    def _read_student(self, name: str) -> None:
        worker = self._section(name)
        if worker is not None:
            self._student = worker.model_args.model_name_or_path or self._sections.pretrain
            self._roles.train = self._megatron(name, "train", worker, self._student)
        else:
            self._student = self._sections.pretrain

    def _read_reference(self) -> None:
        """Read the frozen reference policy: by default the student as it is before training."""
        top, user = self._sections.top, None
        if isinstance(top, Top) and self._mode != "pure":
            user = "use_kl_loss" if top.use_kl_loss else "add_token_level_kl" if top.add_token_level_kl else None
        if REFERENCE not in self._sections.workers:
            if user:
                missing = f"write a reference section, or set {user}: false to do without"
                self._diagnostics.problem(user, f"true needs a reference policy; {missing}")
        elif user is None:
            self._diagnostics.warn(
                "reference: is written but not used; only use_kl_loss and add_token_level_kl compare with it, so it is"
                " not loaded"
            )
        elif (worker := self._sections.workers[REFERENCE]) is not None:
            self._roles.reference = self._reference(worker)

    def _read_critic(self) -> None:
        """Read the critic: by default it begins as the student does. gae is ROLL's default."""
        top = self._sections.top
        needed = isinstance(top, Top) and self._mode != "pure" and top.adv_estimator in (None, "gae")
        if CRITIC not in self._sections.workers:
            if needed:
                self._diagnostics.problem(
                    "adv_estimator",
                    "gae (ROLL's default) needs a critic; write a critic section (training_args, strategy_args,"
                    " device_mapping), or use grpo or reinforce",
                )
        elif not needed:
            self._diagnostics.warn(
                "critic: is written but not used; only adv_estimator: gae needs values, so it is not loaded"
            )
        elif (worker := self._sections.workers[CRITIC]) is not None:
            model = worker.model_args.model_name_or_path or self._student
            self._roles.critic = self._megatron(CRITIC, "train", worker, model)

    def _student_names(self) -> tuple[str, str]:
        """Return what the student's roles are called: an RLVR file made pure by a switch keeps its actor_* names."""
        written, mode = self._sections.workers.keys(), self._mode
        wrong, right = (MIXED_ROLES, PURE_ROLES) if mode == "pure" else (PURE_ROLES, MIXED_ROLES)
        if mode == "pure" and not written & set(PURE_ROLES):
            return MIXED_ROLES if written & set(MIXED_ROLES) else PURE_ROLES
        mode_name = "pure distillation" if mode == "pure" else f"mode {mode!r}"
        for found, expected in zip(wrong, right, strict=True):
            if found in written:
                self._diagnostics.problem(found, f"{mode_name} names this role {expected!r}; rename it")
        return right

    def _section(self, name: str) -> Worker | None:
        if name not in self._sections.workers:
            self._diagnostics.problem(name, "is missing; write this role's section")
        return self._sections.workers.get(name)

    def _reference(self, worker: Worker) -> Role:
        return self._megatron(REFERENCE, "frozen", worker, worker.model_args.model_name_or_path or self._student)

    def _engine(self, path: str, worker: Worker, model: str | None, dtype: Dtype) -> Role:
        role = Role(path, "rollout", worker, vllm=read_vllm(worker, path, self._strict, self._diagnostics))
        role.info = self._model(path, model)
        role.dtype = worker.model_args.dtype or dtype
        return role

    def _megatron(self, path: str, job: Job, worker: Worker, model: str | None) -> Role:
        trained = self._roles.train.megatron if self._roles.train else None
        megatron = read_megatron(worker, path, job, self._strict, self._diagnostics, trained)
        role = Role(path, job, worker, self._model(path, model), megatron=megatron)
        self._check_weights(role)
        written = worker.model_args.dtype
        from_strategy = megatron.dtype if megatron else None
        if written and from_strategy and written != from_strategy:
            self._diagnostics.problem(
                f"{path}.strategy_args.strategy_config.{from_strategy}",
                f"true contradicts {path}.model_args.dtype {written}; keep one of them",
            )
        role.dtype = written or from_strategy or "bf16"
        return role

    def _refuse_adapters(self) -> None:
        """Refuse what would train something else than the user asked for, in one sentence for all roles."""
        sections = self._sections
        teachers = [(sections.teacher_paths[name], worker) for name, worker in sections.teachers.items()]
        found = [
            f"{path}.model_args.{key}"
            for path, worker in [*sections.workers.items(), *teachers]
            for key in ADAPTER_KEYS
            if worker is not None and getattr(worker.model_args, key)
        ]
        if found:
            also = f" ({', '.join(found[1:])} too)" if found[1:] else ""
            self._diagnostics.block(
                found[0],
                "LoRA adapters and frozen modules are not available yet, and all weights would be trained; remove the"
                f" key to train them{also}",
            )

    def _check_weights(self, role: Role) -> None:
        """Hold weights against config.json, once for all roles of a model; what vLLM alone runs, it checks itself."""
        if role.info is None or role.info.path in self._checked:
            return
        self._checked.add(role.info.path)
        key = f"{role.path}.model_args.model_name_or_path"
        try:
            for problem in weight_problems(role.info, needs_head=role.path != CRITIC):
                self._diagnostics.problem(key, problem)
        except ModelFilesError as error:
            self._diagnostics.problem(key, str(error))

    def _model(self, path: str, model: str | None) -> ModelInfo | None:
        """Return what the files of a model say, with a problem reported where that is not enough to run it."""
        key = f"{path}.model_args.model_name_or_path"
        if model is None:
            self._diagnostics.problem(
                key, f"is missing; {path} needs the path of its own model (no other role's model is put in its place)"
            )
            return None
        if model not in self._models:
            self._models[model] = None
            try:
                info = self._models[model] = read_model(find_model(model))
            except ModelFilesError as error:
                self._diagnostics.problem(key, str(error))
                return None
            lacking = {
                "tokenizer files (tokenizer.json)": not has_tokenizer(info.path),
                "weights (model.safetensors or its index)": not info.weight_files,
                f"weights of a {info.model_type} decoder": bool(info.weight_files) and not holds_decoder(info),
            }
            for what, absent in lacking.items():
                if absent:
                    put = "put the files of the model's release there" if "token" in what else "put the weights there"
                    self._diagnostics.block(
                        key, f"{info.path} has no {what}, so this can be planned but not run; {put}"
                    )
        return self._models[model]
