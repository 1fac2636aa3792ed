"""Translate a Trinity-RFT configuration. This module translates names, datasets, rewards and validation.

`objective.py`, `model_sections.py`, `sizes.py` and `synchronizer.py` translate the objective, the models, the sizes and
the age of samples. The rules of single keys are in `keys.py`.

If the default of a key differs between Trinity-RFT and this package, Trinity-RFT's default is set explicitly.
"""

from collections.abc import Callable, Mapping
from typing import Any

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.extras.trinity.translation.keys import (
    DEFAULT_REWARDS,
    EVAL_TASKSETS,
    KEYS,
    REWARDS,
    SFT_ROWS,
    TASKSET,
    TASKSET_KEYS,
)
from roll_opd.extras.trinity.translation.model_sections import models
from roll_opd.extras.trinity.translation.objective import objective
from roll_opd.extras.trinity.translation.reading import Machine, Translation, sort
from roll_opd.extras.trinity.translation.sizes import ROLLOUT, batches, devices, steps, training
from roll_opd.extras.trinity.translation.synchronizer import synchronizer
from roll_opd.workflows.workflow_checks import BOXED, declared_workflows

INPUT = "buffer.explorer_input"
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
UNUSED = {  # prefix of ignored keys -> reason
    "model.critic_model_path": "the algorithm has no critic",
    "trainer.critic_warmup": "the algorithm has no critic",
    "trainer.trainer_strategy": "Megatron-core shards the model",
    "trainer.megatron": "trainer_strategy is not megatron",
    f"{EVAL_TASKSETS}.": "validation uses the same settings as training",
}
THINKING = ("math_workflow", "async_math_workflow")
FilesOf = Callable[[str, str, str | None], list[str]]


def translated(
    values: Mapping[str, Any],
    diag: Diagnostics,
    machine: Machine,
    files_of: FilesOf,
    count: Callable[[list[str]], int],
) -> Translation:
    """Return the translation of `values`, a configuration of Trinity-RFT. Problems are reported to `diag`.

    Args:
        files_of: function (path, split, subset) that returns the files of a dataset.
        count: function that returns the number of rows in files.

    `files_of` and `count` raise ValueError with a message.
    """
    read = Translation(diag, machine)
    sort(read, values, KEYS, "")
    if "data" in values:
        diag.problems.clear()
        diag.error("data", "is a section of Trinity-RFT before 0.2; write buffer.explorer_input instead")
        return read
    _names(read)
    objective(read)
    models(read)
    _rows(read, files_of)
    _reward(read)
    _validation(read, files_of)
    devices(read)
    synchronizer(read, batches(read))
    training(read)
    steps(read, count)
    read.drop_remaining(UNUSED)
    return read


def _names(read: Translation) -> None:
    root, key = read.first("checkpoint_root_dir", default="./checkpoints")
    project = read.get("project", "Trinity-RFT")
    read.put("output_dir", f"{root}/{project}", key, "project" if read.get("project") else "")
    pipeline = "data_processor.experience_pipeline"
    for name, value in read.below(pipeline).items():
        if name == "operators" and value:
            read.diag.error(
                f"{pipeline}.{name}", "experience operators are not supported; process experiences in the workflow"
            )
        else:
            read.drop(f"{pipeline}.{name}", "")


def _rows(read: Translation, files_of: FilesOf) -> None:
    """Translate the training dataset, the workflow and the workflow's sampling settings."""
    sets = read.entries(f"{INPUT}.tasksets")
    if len(sets) == 1:
        sort(read, sets[0], TASKSET_KEYS, f"{TASKSET}.")
    elif sets:
        read.diag.error(
            f"{INPUT}.tasksets",
            f"{len(sets)} tasksets are not supported; write one taskset whose path is a directory with all files",
        )
        return
    files = _files(read, TASKSET, files_of)
    read.put("{train}.data_args.file_name", files, *_place(read, TASKSET))
    read.put("prompt_key", *read.first(f"{TASKSET}.format.prompt_key", default="prompt"))
    read.put("response_key", *read.first(f"{TASKSET}.format.response_key", default="response"))
    for name in ("system_prompt", "reply_prefix"):
        read.copy(name, f"{TASKSET}.format.{name}", f"{INPUT}.{name}")
    workflow, key = read.first(f"{TASKSET}.default_workflow_type", f"{INPUT}.default_workflow_type")
    if not workflow and read.is_pure:
        workflow = "on_policy_distill_workflow"
    if not workflow:
        read.diag.error(f"{INPUT}.default_workflow_type", "is missing; write the name of the workflow")
    read.put("workflow", workflow, key)
    if args := read.below(f"{TASKSET}.workflow_args"):
        read.put("workflow_args", args, f"{TASKSET}.workflow_args")
    _sampling(read, TASKSET, "{infer}.generating_args")
    repeats = read.get("algorithm.repeat_times")
    for key in (f"{TASKSET}.rollout_args.n", f"{TASKSET}.repeat_times"):
        if read.get(key) is not None:
            if read.get(key) not in (1, repeats):
                read.diag.error(key, "algorithm.repeat_times sets the number of responses per prompt; remove this key")
            read.drop(key, "algorithm.repeat_times sets it")
    if not read.values.get("workflow_timeout"):
        read.put("workflow_timeout", 1800)
    _demonstrations(read, files_of)


def _sampling(read: Translation, place: str, section: str) -> None:
    """Translate the sampling settings of the dataset at `place` to a section. Those of the engine come last."""
    for name, ours in SAMPLING.items():
        read.copy(f"{section}.{ours}", f"{place}.rollout_args.{name}", f"model.{name}", f"{ROLLOUT}.{name}")


def _place(read: Translation, place: str) -> list[str]:
    """Return the keys that select the files of the dataset at `place`. Keys that are not set are left out."""
    return [key for name in ("path", "subset_name", "split") if (key := f"{place}.{name}") in read.found]


def _files(read: Translation, place: str, files_of: FilesOf) -> list[str]:
    """Return the files of the dataset at `place`."""
    path = read.get(f"{place}.path")
    if not isinstance(path, str) or not path:
        read.diag.error(
            f"{place}.path", "is missing; write the path of a file of rows, or of a directory with such files"
        )
        return []
    try:
        return files_of(path, str(read.get(f"{place}.split", "train")), read.get(f"{place}.subset_name"))
    except ValueError as error:
        read.diag.error(f"{place}.path", str(error))
        return []


def _demonstrations(read: Translation, files_of: FilesOf) -> None:
    """Translate the demonstrations of the policy losses mix and mix_chord."""
    section, key = read.first(*SFT_ROWS)
    if not isinstance(section, Mapping):
        return
    if read.get("algorithm.algorithm_type") not in ("mix", "mix_chord"):
        read.diag.error(
            key,
            "are supported only by mix and mix_chord; for other algorithms, train on these rows with"
            " start_sft_pipeline.py",
        )
        return
    for name in ("path", "split", "subset_name"):
        if section.get(name) is not None:
            read.found[f"{key}.{name}"] = section[name]
    read.put("demonstrations.data_args.file_name", _files(read, key, files_of), *_place(read, key))
    for name in section.keys() - {"path", "split", "subset_name", "format"}:
        read.drop(f"{key}.{name}", "")
    form = section.get("format") or {}
    if isinstance(form, Mapping) and form.get("prompt_type", "messages") == "messages":
        written = [f"{key}.format.{name}" for name in ("messages_key", "prompt_type") if name in form]
        read.put("demonstrations.data_args.messages", form.get("messages_key", "messages"), *written)
    elif isinstance(form, Mapping):
        read.put("demonstrations.prompt_key", form.get("prompt_key", "prompt"), f"{key}.format.prompt_key")
        read.put("demonstrations.response_key", form.get("response_key", "response"), f"{key}.format.response_key")


def _reward(read: Translation) -> None:
    """Translate the reward function, or by default the workflow's default reward, to a section of `rewards`.

    In the following cases, the workflow itself calls the reward function, so the function becomes a setting of the
    workflow:
        the workflow is a user's class;
        the function has no counterpart in `rewards`;
        the workflow sets arguments that only Trinity-RFT's function has.
    """
    name, key = read.first(f"{TASKSET}.default_reward_fn_type", f"{INPUT}.default_reward_fn_type")
    workflow = read.values.get("workflow")
    name = name or (DEFAULT_REWARDS.get(workflow) if isinstance(workflow, str) else None)
    args, args_key = read.below(f"{TASKSET}.reward_fn_args"), f"{TASKSET}.reward_fn_args"
    if not name:
        if args:
            read.drop(args_key, "the taskset has no reward function")
        return
    builtin = declared_workflows()
    own = not isinstance(workflow, str) or workflow not in builtin
    if own or not isinstance(name, str) or name not in REWARDS:
        read.put("workflow_reward", name, key)
        if args:
            read.put("workflow_reward_args", args, args_key)
        return
    given = read.below(f"{TASKSET}.workflow_args")
    if workflow in BOXED and name == "math_boxed_reward" and (given.keys() & {"with_think", "format_score_coef"}):
        read.put("workflow_reward", name, key or f"{TASKSET}.workflow_args")  # only this reward has these arguments
        return
    if workflow in THINKING and name != "math_reward" and "system_prompt" not in read.values:
        read.put("system_prompt", "", key)  # Trinity-RFT adds a system prompt only for math_reward
    for domain, section in REWARDS[name].items():
        read.put(f"rewards.{domain}", {**section}, key)
    if name == "math_dapo_reward" and args.get("enable_overlong_penalty"):
        penalty = {
            "weight": args.get("penalty_factor", 1.0),
            "max_tokens": args.get("max_response_length", read.values.get("response_length")),
            "cache_tokens": args.get("cache_length"),
        }
        read.put("rewards.math_rule.terms", {"length_penalty": penalty}, args_key)
    elif args:
        read.diag.error(args_key, f"has no counterpart for {name}; move the arguments to rewards, and remove this key")


def _validation(read: Translation, files_of: FilesOf) -> None:
    """Translate validation.

    All validation datasets are joined to one dataset, which is sampled with the settings of the first dataset.
    """
    sets = read.entries(EVAL_TASKSETS)
    files: list[str] = []
    keys: list[str] = []
    for number, one in enumerate(sets):
        place = f"{EVAL_TASKSETS}.{number}"
        sort(read, one, TASKSET_KEYS, f"{place}.")
        files += _files(read, place, files_of)
        keys += _place(read, place)
        for name in ("prompt_key", "response_key"):
            own = read.get(f"{place}.format.{name}")
            if own not in (None, read.values.get(name)):
                read.diag.error(
                    f"{place}.format.{name}",
                    f"{own!r} differs from the column of the training data; rename one of the two columns",
                )
        for name, ours in (("default_workflow_type", "workflow"), ("default_reward_fn_type", None)):
            trained = read.values.get(ours) if ours else read.first(f"{TASKSET}.{name}", f"{INPUT}.{name}")[0]
            if read.get(f"{place}.{name}") not in (None, trained):
                read.diag.error(
                    f"{place}.{name}",
                    "validation and training share this setting; if validation must differ, let the workflow"
                    " read task.is_eval",
                )
    other = read.get(f"{INPUT}.default_eval_workflow_type")
    if sets and other not in (None, "", read.values.get("workflow")):
        read.diag.error(
            f"{INPUT}.default_eval_workflow_type",
            "validation and training share the workflow; if validation must differ, let the workflow read task.is_eval",
        )
    if not sets:
        if "explorer.eval_interval" in read.found:
            read.drop("explorer.eval_interval", "there are no eval_tasksets")
        return
    read.put("validation.data_args.file_name", files, *keys)
    first = f"{EVAL_TASKSETS}.0"
    _sampling(read, first, "validation.generating_args")
    repeats, key = read.first(f"{first}.rollout_args.n", f"{first}.repeat_times", default=1)
    read.put("validation.generating_args.num_return_sequences", repeats, key)
    read.put("eval_steps", *read.first("explorer.eval_interval", default=100))
