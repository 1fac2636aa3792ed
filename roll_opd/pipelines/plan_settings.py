"""Flatten a plan into settings: a map from configuration keys to values.

Every field of the plan's dataclasses is a setting unless it is listed in `NO_SETTINGS`. Fields are renamed to their
configuration keys.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from roll_opd.config.plan import RunPlan, TeacherPlan
from roll_opd.config.schema import CriticKeys, keys_of
from roll_opd.models.model_info import fingerprint
from roll_opd.planner.device_mapping import short_devices
from roll_opd.tracking.secrets import without_secrets

Settings = dict[str, Any]  # key of the configuration -> value, in the types of JSON

CONTENT = " (content)"  # suffix of keys whose value is the hash of a model or of data files
GROUP = "num_return_sequences_in_group"
WHOLE_BYTES = 16 * 2**20  # files up to this size are hashed completely; of larger files, pieces are hashed
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model")  # files that determine a model's outputs
# fields of the plan that do not influence results or follow from other fields
NO_SETTINGS = {
    *(
        "output_dir",
        "logging_dir",
        "exp_name",
        "title",
        "warnings",
        "plain_prompts",
        "memory",
        "flops",
        "config_yaml",
        "checkpoint",
        "trackers",
        "tracker_args",
    ),
    *("logging_steps", "logged_samples_per_step", "device_memory_gb"),
    *("startup_timeout_s", "server_timeout_s", "shutdown_timeout_s", "host_timeout_s", "stall_timeout_s"),
    *(
        "max_restarts",
        "max_lost_workers",
        "min_batch_fraction",
        "total_steps",
        "loss_normaliser",
        "opd_vocab_size",
        "vocab_size",
        "length_key",
        "schema",
        "dp",
    ),
    *("returns_routes", "contexts", "paired", "engines", "key", "name", "domain"),
}
# pattern for the end of a field path -> configuration key in the same section
SPELLED = {
    r"optimizer\.(learning_rate|weight_decay|adam_\w+|max_grad_norm|lr_scheduler_type|warmup_steps)": (
        r"training_args.\1"
    ),
    r"optimizer\.decay_steps": "training_args.lr_scheduler_kwargs.lr_decay_steps",
    r"optimizer\.initial_learning_rate": "training_args.lr_scheduler_kwargs.init_lr",
    r"optimizer\.min_learning_rate": "training_args.lr_scheduler_kwargs.min_lr",
    r"optimizer\.wsd_decay_steps": "training_args.lr_scheduler_kwargs.wsd_decay_steps",
    r"optimizer\.wsd_decay_style": "training_args.lr_scheduler_kwargs.lr_wsd_decay_style",
    r"optimizer\.(\w+)": r"strategy_args.strategy_config.\1",
    r"model\.path": "model_args.model_name_or_path",
    r"model\.dtype": "model_args.dtype",
    r"lora\.(rank|alpha)": r"model_args.lora_\1",
    r"lora\.targets": "model_args.lora_target",
    r"lora\.path": "model_args.adapter_name_or_path",
    r"layout\.tp": "strategy_args.strategy_config.tensor_model_parallel_size",
    r"layout\.pp": "strategy_args.strategy_config.pipeline_model_parallel_size",
    r"layout\.cp": "strategy_args.strategy_config.context_parallel_size",
    r"layout\.ep": "strategy_args.strategy_config.expert_model_parallel_size",
    r"layout\.etp": "strategy_args.strategy_config.expert_tensor_parallel_size",
    r"layout\.vpp": "strategy_args.strategy_config.virtual_pipeline_model_parallel_size",
    r"layout\.sequence_parallel": "strategy_args.strategy_config.sequence_parallel",
    r"(?:megatron_args|engine_args)\.(.+)": r"strategy_args.strategy_config.\1",
    r"tp": "strategy_args.strategy_config.tensor_parallel_size",
    r"max_model_len": "strategy_args.strategy_config.max_model_len",
    r"devices": "device_mapping",
    r"train_limits\.sequences": "training_args.per_device_train_batch_size",
    r"train_limits\.tokens": "max_tokens_per_microbatch_in_train",
    r"forward_limits\.sequences": "infer_batch_size",
    r"forward_limits\.tokens": "max_tokens_per_microbatch_in_infer",
    r"mini_batch_sequences": "training_args.per_device_train_batch_size x gradient_accumulation_steps x ranks",
    r"router_replay": "router_replay.mode",
    r"env\.(.+)": r"system_envs.\1",
    r"tags": "tag_included",
    r"sampling\.stop": "generating_args.stop_strings",
    r"sampling\.n": "generating_args.num_return_sequences",
    r"sampling\.(.+)": r"generating_args.\1",
    r"data\.files": "data_args.file_name",
    r"data\.(template|limit)": r"data_args.\1",
    r"data\.columns\.(.+)": r"data_args.\1",
    r"data\.streams\.(.+)\.weight": r"data_args.domain_interleave_probs.\1",
    r"query_filter\.(.+)": r"query_filter_config.\1",
    r"response_filter\.(.+)": r"response_filter_config.\1",
    r"batch_size": "infer_batch_size",
}
# pattern for a whole field path -> configuration key; "": the field is no setting
AT_THE_TOP = {
    r"objective\.kl_loss": "kl_loss_fn",
    r"objective\.dual_clip": "dual_clip_loss",
    r"objective\.recompute_old_logprobs": "enable_old_logprobs_recompute",
    r"objective\.policy_loss_args\.(clip_low|clip_high|dual_clip)": "",  # derived from pg_clip*
    r"objective\.policy_loss_args\.(.+)": r"policy_loss_fn_args.\1",
    r"objective\.advantage_args\.(mean|std)_cal_level": "",  # derived from norm_mean_type and norm_std_type
    r"objective\.advantage_args\.(.+)": r"advantage_fn_args.\1",
    r"objective\.correction(.*)": r"train_infer_correction\1",
    r"objective\.engine_check.*": "",  # derived from engine_check and generating_args
    r"objective\.(.+)": r"\1",
    r"data\.prompt_length": "prompt_length",
    r"(?:validation|demonstrations)\.data\.(?:prompt_length|on_\w+)": "",
    r"rollout\.model\.path": "",  # the student's
    r"rollout\.sampling\.n": "num_return_sequences_in_group",
    r"rollout\.sampling\.max_new_tokens": "response_length",
    r"rewards\.(.+)\.terms\.\1\.args\.(.+)": r"rewards.\1.\2",
    r"rewards\.(.+)\.terms\.\1\.worker": r"rewards.\1.worker_cls",
    r"rewards\.(.+)\.terms\.\1\.(.+)": r"rewards.\1.\2",
    r"rewards\.(.+)\.worker": r"rewards.\1.worker_cls",
    r"data\.(on_\w+)": r"\1",
    r"data\.template": "global_template",
    r"(?:data|validation\.data|demonstrations\.data)\.tag_templates\.(.+)": r"tag_to_template.\1",
    r"data\.environments\.(.+)": r"train_env_manager.\1",
    r"validation\.data\.environments\.(.+)": r"val_env_manager.\1",
    r"workflow\.workflow_args\.environments\.(.+)": r"custom_envs.\1",
    r"workflow\.(.+)": r"\1",
    r"pipeline_args\.(.+)": r"\1",
    r"epochs": "num_train_epochs",
    r"extra_prompts": "max_additional_running_prompts",
    r"devices_per_node": "num_gpus_per_node",
    r"env\.(.+)": r"system_envs.\1",
}


def settings_of(plan: RunPlan) -> Settings:
    """Return the settings of a run, without API keys, and hashes of its models and data files.

    Raises OSError if a file cannot be read.
    """
    found = dict(_top(plan))
    paths = {role.model.path: f"{role.name}.model_args.model_name_or_path" for role in reversed(plan.roles().values())}
    contents = {key: _model_files(Path(path)) for path, key in paths.items()}
    data = {plan.student.name: plan.data}
    data |= {"validation": plan.validation.data} if plan.validation else {}
    data |= {"demonstrations": plan.demonstrations.data} if plan.demonstrations else {}
    contents |= {f"{name}.data_args.file_name": [Path(file) for file in rows.files] for name, rows in data.items()}
    found |= {f"{key}{CONTENT}": _hash(files) for key, files in contents.items() if files}
    plain: Settings = json.loads(json.dumps(found, default=str))
    return dict(sorted(without_secrets(plain).items()))


def as_written(settings: Settings) -> Settings:
    """Return the settings with the keys and values that the user has written.

    This changes only the settings of a run in environments, because the plan derives some of them from other keys.
    """
    if not any(key.startswith("custom_envs.") for key in settings) or GROUP not in settings:
        return settings
    derived = (GROUP, "prompt_length", "response_length")
    group, prompt, turn = (settings.get(key) or 0 for key in derived)
    sampler = next((key.partition(".")[0] for key in settings if "_infer.generating_args." in key), "actor_infer")
    found = {key: value for key, value in settings.items() if key not in derived} | {
        "train_env_manager.group_size": group,
        "rollout_batch_size": (settings.get("rollout_batch_size") or 0) * group,  # trajectories
        "sequence_length": prompt + turn,
        f"{sampler}.generating_args.max_new_tokens": turn,
    }
    return dict(sorted(found.items()))


def _top(plan: RunPlan) -> Iterator[tuple[str, Any]]:
    """Yield (configuration key, value) for each setting of a plan.

    The keys of a role start with the name of its section.
    """
    sections = {"student": plan.student.name} | ({"rollout": plan.rollout.name} if plan.rollout else {})
    for found, value in _walk(plan, ""):
        section, dot, rest = found.partition(".")
        key = rest if section == "critic" and rest in keys_of(CriticKeys) else _at_the_top(found)
        if key is None and section == "data":
            key = f"{plan.student.name}.{_spelled(found)}"
        elif key is None:
            key = _spelled(f"{sections.get(section, section)}{dot}{rest}")
        if key:
            yield key, value


def _walk(value: Any, key: str, env: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each setting below `value`. A path consists of field names joined by dots.

    A dataclass in a tuple appears in the path under its name. `env` has the environment variables that all processes of
    the run have.
    """
    if is_dataclass(value) and not isinstance(value, type):
        env = value.env if isinstance(value, RunPlan) else env
        for field in fields(value):
            if field.name in NO_SETTINGS:
                continue
            inside = getattr(value, field.name)
            if field.name == "devices":
                inside = short_devices(inside)
            elif field.name == "env" and not isinstance(value, RunPlan):
                inside = {name: text for name, text in inside.items() if (env or {}).get(name) != text}
            # plans of teachers and judges belong to the section of their role
            flat = field.name in ("source", "engine", "context") and is_dataclass(inside)
            yield from _walk(inside, key if flat else f"{key}.{field.name}".lstrip("."), env)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _walk(item, f"{key}.{name}", env)
    elif isinstance(value, tuple) and value and all(map(is_dataclass, value)):
        for number, item in enumerate(value):
            yield from _walk(item, _of_entry(key, item, number), env)
    elif value != ():
        yield key, value


def _of_entry(key: str, item: Any, number: int) -> str:
    if isinstance(item, TeacherPlan):
        return item.source.name
    return f"{key}.{getattr(item, 'domain', None) or getattr(item, 'name', None) or number}"


def _spelled(key: str) -> str:
    """Return a field path in which the end is renamed according to `SPELLED`."""
    for pattern, spelled in SPELLED.items():
        if match := re.fullmatch(rf"(.+\.)?{pattern}", key):
            return (match[1] or "") + re.sub(pattern, spelled, key.removeprefix(match[1] or ""))
    return key


def _at_the_top(key: str) -> str | None:
    """Return the configuration key of a field path according to `AT_THE_TOP`.

    The key is "" if the field is not a setting. The result is None if no pattern of `AT_THE_TOP` matches the path.
    """
    for pattern, spelled in AT_THE_TOP.items():
        if re.fullmatch(pattern, key):
            return re.sub(pattern, spelled, key)
    return None


def _model_files(directory: Path) -> list[Path]:
    """Return the files of a model, except broken links."""
    return sorted(file for pattern in MODEL_FILES for file in directory.glob(pattern) if file.is_file())


def _hash(files: list[Path]) -> str:
    """Return a short hash of the names and contents of files.

    The hash does not depend on the directory of the files.
    """
    digest = hashlib.sha256()
    for file in files:
        small = file.stat().st_size <= WHOLE_BYTES
        content = hashlib.sha256(file.read_bytes()).hexdigest() if small else fingerprint(file)
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()[:12]
