"""Translate the models of a Trinity-RFT configuration: student, teacher, auxiliary models, LoRA and lengths."""

from collections.abc import Mapping
from typing import Any

from roll_opd.extras.trinity.translation.keys import AUXILIARY, AUXILIARY_KEYS, TASKSET, TEACHER_KEYS
from roll_opd.extras.trinity.translation.reading import Translation, sort
from roll_opd.workflows.workflow_checks import declared_workflows

# key of model.lora_configs -> (our key, Trinity-RFT's default)
LORA = {
    "lora_rank": ("lora_rank", 32),
    "lora_alpha": ("lora_alpha", 32),
    "target_modules": ("lora_target", "all-linear"),
}
LENGTHS = ("max_model_len", "max_prompt_tokens", "max_response_tokens")


def models(read: Translation) -> None:
    """Translate the models of all roles, their adapter, and the lengths of prompts and responses."""
    model, key = read.first("model.model_path")
    if not model:
        read.diag.error("model.model_path", "is missing; write the directory of a Hugging Face model")
    for role in (read.train, read.infer, *(["reference"] if "reference" in read.values else [])):
        read.put(f"{role}.model_args.model_name_or_path", model, key)
    read.put("{train}.strategy_args.strategy_name", "megatron_train")
    read.put("{infer}.strategy_args.strategy_name", "vllm")
    if not read.values.get("critic") and "model.critic_model_path" in read.found:
        read.drop("model.critic_model_path", "the algorithm has no critic")
    _auxiliary_models(read)
    _adapter(read)
    lengths = {name: read.first(f"model.{name}", f"explorer.rollout_model.{name}") for name in LENGTHS}
    whole, prompt, response = (lengths[name][0] for name in LENGTHS)
    keys = [lengths[name][1] for name in LENGTHS]
    if isinstance(whole, int) and isinstance(response, int) and prompt is None:
        prompt, keys[1] = whole - response, keys[0]
    elif isinstance(whole, int) and isinstance(prompt, int) and response is None:
        response, keys[2] = whole - prompt, keys[0]
    if prompt is None or response is None:
        missing = "model.max_prompt_tokens" if prompt is None else "model.max_response_tokens"
        read.diag.error(missing, "is missing; write this key, because prompt and response have separate limits here")
        return
    read.put("prompt_length", prompt, keys[1])
    read.put("response_length", response, keys[2])
    if isinstance(whole, int) and isinstance(prompt, int) and isinstance(response, int) and whole < prompt + response:
        read.put("{infer}.strategy_args.strategy_config.max_model_len", whole, keys[0])


def _adapter(read: Translation) -> None:
    """Translate the LoRA adapter of the student."""
    place = "model.lora_configs"
    entries = read.entries(place)
    if not entries:
        return
    known = {"name", "base_model_name", "lora_dtype", "is_dummy", "path", *LORA}
    odd = sorted(key for key in entries[0].keys() - known if entries[0][key])
    if len(entries) > 1 or odd:
        found = f"has {', '.join(odd)}" if odd else f"has {len(entries)} adapters"
        read.diag.error(
            place, f"{found}; only one adapter of the student is supported, with the keys {', '.join(LORA)}"
        )
        return
    for name, (ours, default) in LORA.items():
        read.put(f"{{train}}.model_args.{ours}", entries[0].get(name, default), place)
    if entries[0].get("path") and not entries[0].get("is_dummy"):
        read.put("{train}.model_args.adapter_name_or_path", entries[0]["path"], place)


def _auxiliary_models(read: Translation) -> None:
    """Translate the auxiliary models.

    In distillation, the first auxiliary model is the teacher, and workflows call the other auxiliary models. A workflow
    that is a user's class may also call the teacher. The teacher then gets an inference engine in addition to its
    Megatron role.
    """
    models = read.entries(AUXILIARY)
    workflow, _ = read.first(f"{TASKSET}.default_workflow_type", "buffer.explorer_input.default_workflow_type")
    built_in = declared_workflows()
    calls_teacher = isinstance(workflow, str) and workflow not in built_in
    if read.is_pure and not models:
        read.diag.error(AUXILIARY, "is missing; add the teacher as the first auxiliary model")
    for number, model in enumerate(models):
        place = f"{AUXILIARY}.{number}"
        is_teacher = read.is_pure and not number
        sort(read, model, TEACHER_KEYS if is_teacher and not calls_teacher else AUXILIARY_KEYS, f"{place}.")
        path = read.get(f"{place}.model_path"), f"{place}.model_path"
        if is_teacher:
            read.put("teacher.model_args.model_name_or_path", *path)
            read.put("teacher.strategy_args.strategy_name", "megatron_infer")
        if not is_teacher or calls_teacher:
            ours = read.auxiliaries[place] = f"auxiliary_models.{_name(model, number)}"
            read.put(f"{ours}.model_args.model_name_or_path", *path)
            read.put(f"{ours}.strategy_args.strategy_name", "vllm")
            _auxiliary_sampling(read, place, ours)


def _auxiliary_sampling(read: Translation, place: str, ours: str) -> None:
    """Translate the sampling settings and lengths of an auxiliary model. The defaults are the student's values."""
    for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
        value, key = read.first(f"{place}.{name}", f"model.{name}", default=1.0 if name == "temperature" else None)
        if value is not None:
            read.put(f"{ours}.generating_args.{name}", value, key)
    response, key = read.first(f"{place}.max_response_tokens", "model.max_response_tokens")
    if response is not None:
        read.put(f"{ours}.generating_args.max_new_tokens", response, key)
    length, prompt = (read.first(f"{place}.{name}") for name in ("max_model_len", "max_prompt_tokens"))
    engine = f"{ours}.strategy_args.strategy_config.max_model_len"
    if length[0] is not None:
        read.put(engine, *length)
        if prompt[1]:
            read.drop(prompt[1], "max_model_len sets the limit")
    elif isinstance(prompt[0], int) and isinstance(response, int):
        read.put(engine, prompt[0] + response, prompt[1], key)


def _name(model: Mapping[str, Any], number: int) -> str:
    """Return the name of the section for an auxiliary model."""
    name = str(model.get("name") or "")
    return name if name.isidentifier() else f"auxiliary_{number}"
