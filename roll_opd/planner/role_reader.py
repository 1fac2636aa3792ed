"""Read the roles of a run: the section, the model files, the devices and the strategy of each role.

The roles are the student's training and rollout, the teachers, the reference policy, the critic and the local judges. A
part that could not be read is None, and the checks that need this part are skipped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import LoraPlan
from roll_opd.config.schema import (
    MIXED_ROLES,
    PURE_ROLES,
    Dtype,
    ExternalKeys,
    Run,
    Supervised,
    TeacherWorker,
    Top,
    Worker,
)
from roll_opd.models.layouts import check_layout, check_tensor_parallel
from roll_opd.models.model_info import ModelFilesError, ModelInfo, find_model, read_model
from roll_opd.models.tokenizer_files import has_tokenizer
from roll_opd.models.weight_files import holds_decoder, weight_problems
from roll_opd.planner import key_hints, lora_keys
from roll_opd.planner.read import CRITIC, REFERENCE, Sections
from roll_opd.planner.strategies import OPTIONS, Strategy, read_megatron, read_vllm

MODEL = "model_args.model_name_or_path"  # key in a role's section
Job = Literal["train", "frozen", "rollout"]


@dataclass(frozen=True)
class Role:
    """A role and its section.

    A field is None if it could not be read.
    """

    job: Job
    worker: Worker
    strategy: Strategy
    info: ModelInfo | None = None
    dtype: Dtype = "bf16"
    lora: LoraPlan | None = None  # adapter of the student
    is_aligned: bool = False  # the role is a teacher with a tokenizer other than the student's, aligned by bytes

    @property
    def diag(self) -> Diagnostics:
        """The diagnostics of the role's section."""
        return self.worker.diag

    @property
    def path(self) -> str:
        """The dotted key of the role's section."""
        return self.diag.path

    @property
    def external(self) -> ExternalKeys | None:
        """The section that names an external source of a teacher's log-probs.

        The value is None if the role runs on devices.
        """
        return next(iter(self.worker.sources.values()), None) if isinstance(self.worker, TeacherWorker) else None


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
    auxiliaries: dict[str, Role] = field(default_factory=dict)  # name -> an engine that workflows call

    def placed(self) -> list[Role]:
        """Return every role that has devices."""
        return [*self.all(), *self.judges.values(), *self.auxiliaries.values()]

    def all(self) -> list[Role]:
        """Return the student's roles, the teachers, the reference policy and the critic, without the missing ones."""
        found = (self.train, self.infer, *self.teachers.values(), self.reference, self.critic)
        return [role for role in found if role is not None]

    @property
    def shared_vocabulary(self) -> int:
        """Number of token ids that are valid for the student and for every teacher with the student's tokenizer.

        The value is 0 if no model could be read.
        """
        roles = (self.train, *self.teachers.values())
        models = [role.info for role in roles if role is not None and role.info and not role.is_aligned]
        return min((known.vocab for known in models), default=0)


def choose_mode(values: Mapping[str, Any], pure: bool | None, diag: Diagnostics) -> str:
    """Return the mode of a run: pure, mixed or rl.

    Args:
        values: the configuration.
        pure: whether the run is pure distillation; None means that the configuration decides.
    """
    # read from the raw values: a wrong value elsewhere at the top level must not change the mode
    is_pure, mixed = values.get("is_pure_opd") is True, values.get("use_opd") is True
    if mixed and (is_pure or pure):
        diag.error("use_opd", "use_opd and pure distillation (is_pure_opd) exclude each other; choose one of them")
    if pure is None:
        said_not = mixed or values.get("is_pure_opd") is False
        pure = not said_not and any(role in values for role in PURE_ROLES)
    if is_pure or pure:
        return "pure"
    return "mixed" if mixed else "rl"


def written_workers(sections: Sections) -> list[Worker]:
    """Return the sections of all configured roles, except judges and auxiliary models.

    Sections that could not be read are left out.
    """
    written = [*sections.workers.values(), *sections.teachers.values()]
    return [worker for worker in written if worker is not None]


class RoleReader:
    """Reader of the roles of one configuration.

    Each model directory is read once, even if several roles use the model.
    """

    def __init__(self, sections: Sections, mode: str, diag: Diagnostics) -> None:
        self._sections, self._mode, self._diag = sections, mode, diag
        top = sections.top
        self._strict = bool(top and top.strict_strategies)
        # 1 if `top` is None, because its problem is already reported
        self._devices = (top.num_nodes or 1) * top.num_gpus_per_node if top else 1
        self._models: dict[str, ModelInfo | None] = {}
        self._checked: set[Path] = set()  # models whose weights were compared with config.json
        self._roles = Roles(mode)
        self._student: str | None = None

    def read(self, keys: type[Run]) -> Roles:
        """Return the roles of the pipeline.

        Args:
            keys: the class that defines the keys of the pipeline.
        """
        return self._supervised(keys) if issubclass(keys, Supervised) else self._rolled_out()

    def _supervised(self, pipeline: type[Supervised]) -> Roles:
        """Return the roles of a supervised pipeline."""
        self._read_student(pipeline.role)
        reference = self._sections.workers.get(REFERENCE)
        if reference is not None and self._roles.train is not None:
            self._roles.reference = self._megatron("frozen", reference, self._student)
        self._check_sections()
        self._check_adapters()
        return self._roles

    def _rolled_out(self) -> Roles:
        """Return the roles of a run with rollouts.

        The mode of the run decides which roles it needs.
        """
        sections, roles, diag = self._sections, self._roles, self._diag
        train_name, infer_name = self._student_names()
        self._read_student(train_name)
        infer = self._section(infer_name)
        if infer is not None:
            dtype: Dtype = roles.train.dtype if roles.train else "bf16"
            roles.infer = self._engine(infer, self._student, dtype, roles.train.strategy if roles.train else Strategy())
        if self._mode == "rl" and sections.teachers:
            diag.add_warning("teacher: is written but not used; set use_opd: true to distil from it")
        elif self._mode != "rl":
            if not sections.teachers:
                diag.error("teacher", "is missing; write a teacher section with a model_name_or_path")
            for name, worker in sections.teachers.items():
                if worker is not None:
                    roles.teachers[name] = self._teacher(worker)
        self._read_reference_and_critic()
        for domain, worker in sections.judges.items():
            if worker is not None:
                roles.judges[domain] = self._engine(worker, None, "bf16")
        for name, model in sections.auxiliaries.items():
            if isinstance(model, Worker):
                roles.auxiliaries[name] = self._engine(model, None, "bf16")
        self._check_sections()
        self._check_adapters()
        return roles

    def _teacher(self, worker: Worker) -> Role:
        """Return the role of a teacher.

        The role is a Megatron role, or a role without devices if an external source computes the log-probs.
        """
        assert isinstance(worker, TeacherWorker)
        if not worker.sources:
            return self._megatron("frozen", worker, self._student if worker.follows_student else None)
        first, *others = worker.sources
        for other in others:
            worker.diag.error(other, f"is a second source of the teacher's log-probs after {first}; remove one of them")
        info, model = None, worker.model_args.model_name_or_path
        needs_model = worker.sources[first].needs_model
        if needs_model and model is None:
            worker.diag.error(MODEL, f"is missing; {first} needs the directory of the teacher's model")
        if model is not None:
            with worker.diag.catching(MODEL, ModelFilesError):
                info = read_model(find_model(model))
                if not has_tokenizer(info.path):
                    worker.diag.error(
                        MODEL,
                        f"{info.path} has no tokenizer.json; give the directory of the teacher's tokenizer, or"
                        " remove this key",
                    )
        if needs_model:
            self._check_weights(worker, info)
        return Role("frozen", worker, Strategy(), info)

    def _read_student(self, name: str) -> None:
        worker = self._section(name)
        self._student = self._sections.pretrain
        if worker is not None:
            self._student = worker.model_args.model_name_or_path or self._student
            student = self._megatron("train", worker, self._student)
            lora = lora_keys.read_lora(worker.model_args)
            if lora and student.info and student.info.experts:
                lora_keys.check_experts(lora, worker.model_args)
            if lora and student.info:
                lora_keys.check_modules(lora, student.info, worker.model_args)
            self._roles.train = replace(student, lora=lora)

    def _read_reference_and_critic(self) -> None:
        """Read the reference policy and the critic.

        By default, both start from the student's model.
        """
        top, written = self._sections.top, self._sections.workers
        compares, needs_values = "", False
        if isinstance(top, Top) and self._mode != "pure":
            compares = "use_kl_loss" if top.use_kl_loss else "add_token_level_kl" if top.add_token_level_kl else ""
            needs_values = top.adv_estimator == "gae"
            if compares and REFERENCE not in written:
                missing = f"write a reference section, or set {compares}: false to run without one"
                top.diag.error(compares, f"true needs a reference policy; {missing}")
            if needs_values and CRITIC not in written:
                top.diag.error(
                    "adv_estimator",
                    "gae (ROLL's default) needs a critic; write a critic section (training_args, strategy_args,"
                    " device_mapping), or use grpo or reinforce",
                )
        if reference := self._used(
            REFERENCE, bool(compares), "use_kl_loss and add_token_level_kl need a reference policy"
        ):
            self._roles.reference = self._megatron("frozen", reference, self._student)
        if critic := self._used(CRITIC, needs_values, "adv_estimator: gae needs a critic"):
            self._roles.critic = self._megatron("train", critic, self._student)

    def _used(self, name: str, is_used: bool, use: str) -> Worker | None:
        """Return the section of a role if the run uses the role, else None.

        A section that is written but not used causes a warning.
        """
        if not is_used and name in self._sections.workers:
            self._diag.add_warning(f"{name}: is written but not used, and its model is not loaded; only {use}")
        return self._sections.workers.get(name) if is_used else None

    def _student_names(self) -> tuple[str, str]:
        """Return (training role, rollout role): the names of the student's two sections in this mode.

        If the configuration has only the names of the other mode, those names are returned.
        """
        written, mode = self._sections.workers.keys(), self._mode
        wrong, right = (MIXED_ROLES, PURE_ROLES) if mode == "pure" else (PURE_ROLES, MIXED_ROLES)
        if not written & set(right):
            return wrong if written & set(wrong) else right
        mode_name = "pure distillation" if mode == "pure" else f"mode {mode!r}"
        for found, expected in zip(wrong, right, strict=True):
            if found in written:
                self._diag.error(found, f"{mode_name} names this role {expected!r}; rename it")
        return right

    def _section(self, name: str) -> Worker | None:
        if name not in self._sections.workers:
            self._diag.error(name, "is missing; write this role's section")
        return self._sections.workers.get(name)

    def _engine(self, worker: Worker, model: str | None, dtype: Dtype, student: Strategy | None = None) -> Role:
        """Return a vLLM role.

        Args:
            worker: the section of the role.
            model: the model if the section names no model.
            dtype: the precision if the section sets no precision.
            student: the student's strategy; its devices are the devices of a role without a device_mapping.
        """
        strategy = read_vllm(worker, self._strict, student, every=self._devices if student else 0)
        info = self._model(worker, model)
        if info and strategy.layout:
            diag, tp = worker.diag.below(OPTIONS), strategy.layout.tp
            check_tensor_parallel(info, tp, "tensor_parallel_size", diag, copies_kv_heads=True)
        return Role("rollout", worker, strategy, info, worker.model_args.dtype or dtype)

    def _megatron(self, job: Job, worker: Worker, model: str | None) -> Role:
        """Return a Megatron role.

        Args:
            model: the model if the section of the role names no model.
        """
        trained = self._roles.train.strategy if self._roles.train else None
        strategy = read_megatron(worker, job, self._strict, trained, every=self._devices)
        info = self._model(worker, model)
        self._check_weights(worker, info)
        if info and strategy.layout:
            check_layout(info, strategy.layout, strategy.args, worker.diag.below(OPTIONS))
        return Role(job, worker, strategy, info, self._precision(job, worker, strategy))

    def _precision(self, job: Job, worker: Worker, strategy: Strategy) -> Dtype:
        """Return the precision in which the role computes. Keys that contradict each other are refused.

        Training in fp16 is not available, so a trained role gets bf16 instead. With strict_strategies, nothing is
        replaced.
        """
        found: dict[str, Dtype] = {"model_args.dtype": worker.model_args.dtype} if worker.model_args.dtype else {}
        switches: tuple[Dtype, ...] = ("bf16", "fp16")
        found |= {f"training_args.{name}": name for name in switches if getattr(worker.training_args, name)}
        found |= {f"{OPTIONS}.{strategy.dtype}": strategy.dtype} if strategy.dtype else {}
        key, requested = next(iter(found.items()), ("", "bf16"))
        for other, dtype in found.items():
            if dtype != requested:
                contradicts = f"true contradicts {worker.diag.at(key)} {worker.model_args.dtype or 'true'}"
                worker.diag.error(other, f"{contradicts}; keep only one of these keys")
        if job == "frozen" or requested != "fp16" or self._strict:
            return requested
        text = "training in fp16 is not available, because gradients in fp16 need a scaled loss; bf16 takes its place"
        worker.diag.note(key, f"{text} (write fp32 if the GPU has no bf16)")
        return "bf16"

    def _check_sections(self) -> None:
        """Report keys that have no effect in the roles that the run uses.

        Roles that the run does not use are reported by `_used`.
        """
        top, train, infer = self._sections.top, self._roles.train, self._roles.infer
        plays = isinstance(top, Top) and top.makes_tasks
        templates = {top.global_template if top else None, train.worker.data_args.template if train else None}
        for role in self._roles.placed():
            rows = role.worker.data_args
            # ROLL's files repeat the template of the rows in every role
            repeated = {"template"} if rows.template in templates else set()
            if role is not train and rows.written - repeated:
                _report_unread(role, "data_args", "reads no rows", None if plays else train)
            if role.job != "train" and role.worker.training_args.written:
                _report_unread(role, "training_args", "does not learn", train)
            if role.job != "rollout" and role.worker.generating_args.written:
                _report_unread(role, "generating_args", "generates nothing", infer)
            for key in key_hints.unread(role.worker, self._kind(role)):
                if key not in key_hints.TEACHER_KEYS:
                    role.diag.unused(key)
                elif teacher := next(iter(self._roles.teachers.values()), None):
                    at_top = f", or {key} at the top" if isinstance(top, Top) and hasattr(top, key) else ""
                    where = f"write it at {teacher.diag.at(key)}{at_top}"
                    role.diag.note(key, f"has no effect, as this role is not a teacher; {where}")
                else:
                    _report_unread(role, key, "is not a teacher", None)

    def _kind(self, role: Role) -> str:
        """Return the kind of a role with devices: one of the kinds in `key_hints`."""
        if role.job == "rollout":
            return key_hints.ROLLOUT
        if any(role is teacher for teacher in self._roles.teachers.values()):
            return key_hints.ELSEWHERE if role.external else key_hints.TEACHER
        kinds = {key_hints.TRAIN: self._roles.train, key_hints.CRITIC: self._roles.critic}
        return next((kind for kind, one in kinds.items() if role is one), key_hints.FROZEN)

    def _check_adapters(self) -> None:
        """Check the keys for adapters.

        Adapters of models other than the student are refused. Keys that select the trained weights in a way that is not
        available yet are refused too.
        """
        student, infer = self._roles.train, self._roles.infer
        never: dict[str, list[str]] = {}
        for args in [worker.model_args for worker in written_workers(self._sections)]:
            for key in lora_keys.NEVER:
                if getattr(args, key):
                    never.setdefault(key, []).append(args.diag.at(key))
            requested = lora_keys.adapter_key(args)
            if requested is None and args.lora_alpha and args.lora_rank is None:
                args.diag.note(
                    "lora_alpha",
                    "has no effect without lora_rank or lora_target; set lora_rank for LoRA, or remove lora_alpha",
                )
            if requested is None or (student and args is student.worker.model_args):
                continue
            if infer and student and student.lora and args is infer.worker.model_args:
                # the rollout has the student's adapter
                args.diag.unused(*(key for key in lora_keys.KEYS if getattr(args, key)))
            else:
                text = (
                    "only the student has an adapter; remove the key, or give a model whose weights already contain the"
                    " adapter"
                )
                args.diag.error(requested, text)
        for found in never.values():
            also = f" ({', '.join(found[1:])} too)" if found[1:] else ""
            text = "is not available yet, so the run would train other weights than requested; remove the key"
            self._diag.unsupported(found[0], text + also)

    def _check_weights(self, worker: Worker, info: ModelInfo | None) -> None:
        """Check that the weights of a model agree with its config.json.

        Each model is checked once. Models of engines are not checked here, because vLLM makes this check itself.
        """
        if info is None or info.path in self._checked:
            return
        self._checked.add(info.path)
        with worker.diag.catching(MODEL, ModelFilesError):
            for problem in weight_problems(info, needs_head=worker.diag.path != CRITIC):
                worker.diag.error(MODEL, problem)

    def _model(self, worker: Worker, model: str | None) -> ModelInfo | None:
        """Return the facts of a role's model; report a model that cannot be run.

        Args:
            model: the model if the section of the role names no model.
        """
        model = worker.model_args.model_name_or_path or model
        if model is None:
            needs = f"{worker.diag.path} needs the path of a model (no other role's model is its default)"
            worker.diag.error(MODEL, f"is missing; {needs}")
            return None
        if model in self._models:
            return self._models[model]
        info: ModelInfo | None = None
        with worker.diag.catching(MODEL, ModelFilesError):
            info = read_model(find_model(model))
            lacking = {
                "tokenizer files (tokenizer.json)": not has_tokenizer(info.path),
                "weights (model.safetensors or its index)": not info.weight_files,
                f"weights of a {info.model_type} decoder": bool(info.weight_files) and not holds_decoder(info),
            }
            for what in [what for what, absent in lacking.items() if absent]:
                put = "add the files of the model's release" if "token" in what else "add the weights"
                worker.diag.unsupported_here(
                    MODEL, f"{info.path} has no {what}, so the run can be planned but not started; {put}"
                )
        self._models[model] = info
        return info


def _report_unread(role: Role, section: str, why: str, reader: Role | None) -> None:
    """Report that a section of a role has no effect.

    Args:
        section: name of the section.
        why: the reason, as the end of "this role ...".
        reader: the role that reads a section of this name, or None.
    """
    where = f"write it in {reader.path}" if reader else "remove it"
    role.diag.note(section, f"has no effect, as this role {why}; {where}")
