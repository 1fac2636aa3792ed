"""Read the roles of a run: the model files, the devices and the strategy of each role.

The roles are the student's training and rollout, the teachers, the reference policy, the critic and the local judges.
Each role is its section with derived values. A value that could not be read is None, and the checks that need this
value are skipped.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.schema import (
    MIXED_ROLES,
    PURE_ROLES,
    Dtype,
    Job,
    Run,
    Supervised,
    TeacherWorker,
    Top,
    Worker,
    changed,
    unread,
)
from roll_opd.models.hub_models import note_download
from roll_opd.models.layouts import check_layout, check_tensor_parallel
from roll_opd.models.model_info import ModelFilesError, ModelInfo, find_model, read_model
from roll_opd.models.tokenizer_files import has_tokenizer
from roll_opd.models.weight_files import holds_decoder, weight_problems
from roll_opd.planner import lora_keys, unknown_keys
from roll_opd.planner.altering_options import with_speculation
from roll_opd.planner.layouts_and_devices import OPTIONS, read_megatron, read_vllm
from roll_opd.planner.validate_sections import CRITIC, REFERENCE, Sections

MODEL = "model_args.model_name_or_path"  # key in a role's section


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


class RoleReader:
    """Reader of the roles of one configuration. It fills in the derived values of the roles in `sections`.

    Each model directory is read once, even if several roles use the model.
    """

    def __init__(self, sections: Sections, diag: Diagnostics) -> None:
        self._sections, self._mode, self._diag = sections, sections.mode, diag
        top = sections.top
        self._strict = bool(top and top.strict_strategies)
        # 1 if `top` is None, because its problem is already reported
        self._devices = (top.num_nodes or 1) * top.num_gpus_per_node if top else 1
        self._models: dict[str, ModelInfo | None] = {}
        self._checked: set[Path] = set()  # models whose weights were compared with config.json
        self._student: str | None = None

    def read(self, keys: type[Run]) -> None:
        """Read the roles of the pipeline whose keys are declared by the class `keys`."""
        if issubclass(keys, Supervised):
            self._read_student(keys.role)
            reference = self._sections.workers.get(REFERENCE)
            if reference is not None and self._sections.train is not None:
                self._sections.reference = self._megatron("frozen", reference, self._student)
        else:
            self._read_rolled_out()
        self._check_sections()
        self._check_adapters()

    def _read_rolled_out(self) -> None:
        """Read the roles of a run with rollouts. The mode of the run decides which roles it needs."""
        sections, diag = self._sections, self._diag
        train_name, infer_name = self._student_names()
        self._read_student(train_name)
        if infer := self._section(infer_name):
            student = sections.train or Worker()  # a student with a problem has no devices
            sections.infer = self._engine(infer, self._student, student.dtype, student)
            sections.workers[infer_name] = sections.infer
        has_teacher = sections.teachers or sections.lacks_teacher
        if self._mode == "rl":
            if has_teacher:
                diag.add_warning("teacher: is written but not used; set use_opd: true to distil from it")
            sections.teachers, sections.lacks_teacher = {}, False
        elif not has_teacher:
            diag.error("teacher", "is missing; write a teacher section with a model_name_or_path")
        for name, worker in sections.teachers.items():
            sections.teachers[name] = self._teacher(worker)
        self._read_reference_and_critic()
        for domain, worker in sections.judges.items():
            sections.judges[domain] = self._engine(worker, None, "bf16")
        for name, model in sections.auxiliaries.items():
            if isinstance(model, Worker):
                sections.auxiliaries[name] = self._engine(model, None, "bf16")

    def _teacher(self, worker: Worker) -> Worker:
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
                        MODEL, f"{info.path} has no tokenizer.json; give the teacher's tokenizer, or remove this key"
                    )
        if needs_model and not (info and model and note_download(worker.diag, MODEL, model, info.path)):
            self._check_weights(worker, info)
        return changed(worker, {"info": info})

    def _read_student(self, name: str) -> None:
        worker = self._section(name)
        self._student = self._sections.pretrain
        if worker is not None:
            self._student = worker.model_args.model_name_or_path or self._student
            student = self._megatron("train", worker, self._student)
            lora = lora_keys.read_lora(worker.model_args)
            if lora and student.info and student.info.experts:
                lora_keys.check_experts(lora, student.info, student.layout, worker.model_args)
            if lora and student.info:
                lora_keys.check_modules(lora, student.info, worker.model_args)
            self._sections.train = self._sections.workers[name] = changed(student, {"lora": lora})

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
            self._sections.reference = self._megatron("frozen", reference, self._student)
        if critic := self._used(CRITIC, needs_values, "adv_estimator: gae needs a critic"):
            self._sections.critic = self._megatron("train", critic, self._student)

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

    def _engine(self, worker: Worker, model: str | None, dtype: Dtype, student: Worker | None = None) -> Worker:
        """Return a vLLM role.

        Args:
            worker: the section of the role.
            model: the model if the section names no model.
            dtype: the precision if the section sets no precision.
            student: the student; its devices are the devices of a role without a device_mapping.
        """
        found = read_vllm(worker, self._strict, student, every=self._devices if student else 0)
        precision = worker.model_args.dtype or dtype
        role = changed(worker, {**found, "job": "rollout", "info": self._model(worker, model), "dtype": precision})
        role = with_speculation(role)
        if role.info and role.layout:
            diag, tp = worker.diag.below(OPTIONS), role.layout.tp
            check_tensor_parallel(role.info, tp, "tensor_parallel_size", diag, copies_kv_heads=True)
        return role

    def _megatron(self, job: Job, worker: Worker, model: str | None) -> Worker:
        """Return a Megatron role.

        Args:
            model: the model if the section of the role names no model.
        """
        found = read_megatron(worker, job, self._strict, self._sections.train, every=self._devices)
        role = changed(worker, {**found, "job": job, "info": self._model(worker, model)})
        self._check_weights(worker, role.info)
        if role.info and role.layout:
            check_layout(role.info, role.layout, role.engine_args, worker.diag.below(OPTIONS))
        return changed(role, {"dtype": self._precision(role)})

    def _precision(self, worker: Worker) -> Dtype:
        """Return the precision in which the role computes. Keys that contradict each other are refused.

        Training in fp16 is not available, so a trained role gets bf16 instead. With strict_strategies, nothing is
        replaced.
        """
        found: dict[str, Dtype] = {"model_args.dtype": worker.model_args.dtype} if worker.model_args.dtype else {}
        switches: tuple[Dtype, ...] = ("bf16", "fp16")
        found |= {f"training_args.{name}": name for name in switches if getattr(worker.training_args, name)}
        found |= {f"{OPTIONS}.{worker.engine_dtype}": worker.engine_dtype} if worker.engine_dtype else {}
        key, requested = next(iter(found.items()), ("", "bf16"))
        for other, dtype in found.items():
            if dtype != requested:
                contradicts = f"true contradicts {worker.diag.at(key)} {worker.model_args.dtype or 'true'}"
                worker.diag.error(other, f"{contradicts}; keep only one of these keys")
        if worker.job == "frozen" or requested != "fp16" or self._strict:
            return requested
        text = "training in fp16 is not available, because gradients in fp16 need a scaled loss; bf16 takes its place"
        worker.diag.note(key, f"{text} (write fp32 if the GPU has no bf16)")
        return "bf16"

    def _check_sections(self) -> None:
        """Report keys that have no effect in the roles that the run uses.

        Roles that the run does not use are reported by `_used`.
        """
        top, train, infer = self._sections.top, self._sections.train, self._sections.infer
        plays = isinstance(top, Top) and top.makes_tasks
        teacher = next(iter(self._sections.teachers.values()), None)
        readers = {  # key -> (end of "this role ...", the role that reads the key)
            "data_args": ("reads no rows", None if plays else train),
            "training_args": ("does not learn", train),
            "generating_args": ("generates nothing", infer),
            "opd_kl_coef": ("is not a teacher", teacher),
            "tag_included": ("is not a teacher", teacher),
        }
        templates = {top.global_template if top else None, train.data_args.template if train else None}
        for role in self._sections.placed():
            rows = role.data_args
            # ROLL's files repeat the template of the rows in every role
            repeated = {"template"} if rows.template in templates else set()
            for key in unread(role, {"kind": self._kind(role)}):
                if key == "worker_cls" or (key == "data_args" and rows.written <= repeated):
                    continue  # ROLL's classes of roles are reported where they select a loss
                if key not in readers:
                    role.diag.unused(key)
                    continue
                why, reader = readers[key]
                at_top = f", or {key} at the top" if reader and hasattr(top, key) else ""
                where = f"write it at {reader.diag.at(key)}{at_top}" if reader else "remove it"
                role.diag.note(key, f"has no effect, as this role {why}; {where}")

    def _kind(self, role: Worker) -> str:
        """Return the kind of a role with devices: one of the kinds in `unknown_keys`."""
        if role.job == "rollout":
            return unknown_keys.ROLLOUT
        if any(role is teacher for teacher in self._sections.teachers.values()):
            return unknown_keys.ELSEWHERE if role.external else unknown_keys.TEACHER
        kinds = {unknown_keys.TRAIN: self._sections.train, unknown_keys.CRITIC: self._sections.critic}
        return next((kind for kind, one in kinds.items() if role is one), unknown_keys.FROZEN)

    def _check_adapters(self) -> None:
        """Check the keys for adapters.

        Adapters of models other than the student are refused. Keys that select the trained weights in a way that is not
        available yet are refused too.
        """
        student, infer = self._sections.train, self._sections.infer
        never: dict[str, list[str]] = {}
        for args in [worker.model_args for worker in self._sections.written()]:
            for key in lora_keys.NEVER:
                if getattr(args, key):
                    never.setdefault(key, []).append(args.diag.at(key))
            requested = lora_keys.adapter_key(args)
            if requested is None and args.lora_alpha and args.lora_rank is None:
                args.diag.note(
                    "lora_alpha", "has no effect without lora_rank or lora_target; set lora_rank, or remove lora_alpha"
                )
            if requested is None or (student and args is student.model_args):
                continue
            if infer and student and student.lora and args is infer.model_args:
                # the rollout has the student's adapter
                args.diag.unused(*(key for key in lora_keys.KEYS if getattr(args, key)))
            else:
                text = "only the student has an adapter; remove it, or give a model with merged weights"
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
        is_default = worker.model_args.model_name_or_path is None and model == self._sections.pretrain
        diag, key = (self._diag, "pretrain") if is_default else (worker.diag, MODEL)
        with diag.catching(key, ModelFilesError):
            info = read_model(find_model(model))
            is_whole = not note_download(diag, key, model, info.path)
            lacking = {
                "tokenizer files (tokenizer.json)": not has_tokenizer(info.path),
                "weights (model.safetensors or its index)": is_whole and not info.weight_files,
                f"weights of a {info.model_type} decoder": bool(info.weight_files) and not holds_decoder(info),
            }
            for what in [what for what, absent in lacking.items() if absent]:
                put = "add the files of the model's release" if "token" in what else "add the weights"
                diag.unsupported_here(
                    key, f"{info.path} has no {what}, so the run can be planned but not started; {put}"
                )
        self._models[model] = info
        return info
