"""Translate the sizes of a Trinity-RFT configuration: devices, batches, optimizer and steps."""

import math
from collections.abc import Callable, Mapping

from roll_opd.extras.trinity.translation.keys import AUXILIARY, DTYPES, TASKSET
from roll_opd.extras.trinity.translation.reading import Translation
from roll_opd.objective.algorithms import algorithm
from roll_opd.objective.registry import AlgorithmError

MAX_PER_DEVICE = 8  # sequences per micro-batch if tokens are not limited
ROLLOUT, TEACHER = "explorer.rollout_model", f"{AUXILIARY}.0"  # sections of engines
_ACTOR = "trainer.trainer_config.actor_rollout_ref.actor"
_VERL = "trainer.trainer_config.trainer"


def devices(read: Translation) -> None:
    """Translate the devices.

    Training, sampling and the teacher get separate GPUs. On a machine without GPUs, all roles share the slots.
    """
    places = (ROLLOUT, *([TEACHER] if "teacher" in read.values else []))
    sizes = {place: _engine_devices(read, place) for place in places}
    # includes a teacher that workflows call
    auxiliary = {place: _engine_devices(read, place) for place in read.auxiliaries}
    if not read.machine.has_gpus:
        _slots(read, list(sizes | auxiliary))
        return
    nodes, each = read.number("cluster.node_num", 1), read.number("cluster.gpu_per_node", read.machine.devices)
    taken = sum(sizes.values()) + sum(auxiliary.values())
    read.devices = nodes * each - taken
    if read.devices < 1:
        text = f"engines use {taken} GPUs, and the cluster has {nodes} x {each} GPUs; leave some GPUs for training"
        read.diag.error("cluster.gpu_per_node", text)
        return
    read.put("num_nodes", nodes, "cluster.node_num" if read.get("cluster.node_num") else "")
    read.put("num_gpus_per_node", each, "cluster.gpu_per_node" if read.get("cluster.gpu_per_node") else "")
    dtype, key = read.first(f"{ROLLOUT}.dtype", default="bfloat16")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        read.diag.error(key, f"should be one of {', '.join(DTYPES)}, got {read.diag.as_written(key, dtype)}")
        return
    for role in _roles(read):
        read.put(f"{role}.model_args.dtype", DTYPES[dtype], key)
    _mappings(read, sizes, auxiliary)
    _engine_options(read)
    _training_layout(read)


def _engine_devices(read: Translation, place: str) -> int:
    """Return the number of devices that the engines of a Trinity-RFT section use."""
    return read.number(f"{place}.engine_num", 1) * read.number(f"{place}.tensor_parallel_size", 1)


def _roles(read: Translation) -> tuple[str, ...]:
    return read.train, read.infer, *read.frozen, *read.auxiliaries.values()


def _slots(read: Translation, engines: list[str]) -> None:
    """Translate the devices of a machine without GPUs: all roles share the slots, and compute in fp32."""
    read.devices = read.machine.devices
    dropped = ["cluster.node_num", "cluster.gpu_per_node", f"{ROLLOUT}.gpu_memory_utilization"]
    dropped += [f"{place}.{name}" for place in engines for name in ("engine_num", "tensor_parallel_size", "dtype")]
    dropped += [name for name in read.found if name.startswith("trainer.megatron.")]
    for name in (*dropped, "trainer.ulysses_sequence_parallel_size"):
        if name in read.found:
            read.drop(name, "this machine has no GPUs: all roles share its slots, in fp32")
    if (chunked := f"{ROLLOUT}.enable_chunked_prefill") in read.found:
        read.drop(chunked, "this machine has no GPUs, and chunked prefill on a CPU breaks seeded sampling")
    for role in _roles(read):
        read.put(f"{role}.model_args.dtype", "fp32")
    for number, section in enumerate(read.auxiliaries.values()):
        read.put(f"{section}.device_mapping", f"[{number % read.devices}]")


def _mappings(read: Translation, sizes: Mapping[str, int], auxiliary: Mapping[str, int]) -> None:
    """Give each role its own GPUs, the student first. The reference and the critic share the student's GPUs."""
    owned = {read.train: read.devices, read.infer: sizes[ROLLOUT], "teacher": sizes.get(TEACHER, 0)}
    owned |= {section: auxiliary[place] for place, section in read.auxiliaries.items()}
    first = 0
    for role, size in owned.items():
        if size:
            read.put(f"{role}.device_mapping", f"list(range({first},{first + size}))", "cluster.gpu_per_node")
            first += size
    for role in read.frozen:
        if role != "teacher":
            read.put(f"{role}.device_mapping", f"list(range(0,{read.devices}))", "cluster.gpu_per_node")


def _engine_options(read: Translation) -> None:
    """Translate the options of the inference engines, and the tensor-parallel size of the teacher."""
    options = "strategy_args.strategy_config"
    for name in ("tensor_parallel_size", "gpu_memory_utilization", "enable_chunked_prefill"):
        read.copy(f"{{infer}}.{options}.{name}", f"{ROLLOUT}.{name}")
    for place, section in read.auxiliaries.items():
        read.copy(f"{section}.{options}.tensor_parallel_size", f"{place}.tensor_parallel_size")
    if "teacher" in read.values:
        key = f"{TEACHER}.tensor_parallel_size"
        read.put(f"teacher.{options}.tensor_model_parallel_size", read.number(key, 1), key)


def _training_layout(read: Translation) -> None:
    """Translate the parallel layout of training.

    The layout of a Megatron trainer is copied. Ulysses becomes tensor parallelism with sequence parallelism.
    """
    if read.get("trainer.trainer_strategy") == "megatron":
        _megatron(read)
        return
    size, key = read.first("trainer.ulysses_sequence_parallel_size", f"{_ACTOR}.ulysses_sequence_parallel_size")
    if isinstance(size, int) and size > 1:
        read.put("{train}.strategy_args.strategy_config.tensor_model_parallel_size", size, key)
        read.put("{train}.strategy_args.strategy_config.sequence_parallel", True, key)
        read.devices //= size


def _megatron(read: Translation) -> None:
    """Translate the parallel layout of Trinity-RFT's Megatron trainer."""
    ours = "{train}.strategy_args.strategy_config"
    copy = 1  # devices per replica of the model
    for name in ("tensor", "pipeline", "context", "expert", "virtual_pipeline", "expert_tensor"):
        theirs = f"{name}_parallel_size" if name in ("context", "expert_tensor") else f"{name}_model_parallel_size"
        key = f"trainer.megatron.{theirs}"
        if read.get(key) is None:  # Megatron's default
            continue
        size = read.number(key, 1)
        read.put(f"{ours}.{theirs}", size, key)
        if name in ("tensor", "pipeline", "context"):
            copy *= size
    key = "trainer.megatron.sequence_parallel"
    if read.get("trainer.megatron.tensor_model_parallel_size", 1) != 1:
        read.put(f"{ours}.sequence_parallel", *read.first(key, default=True))
    read.devices //= copy


def batches(read: Translation) -> int:
    """Translate the number of prompts per step, the number of sequences per update, and the micro-batches.

    Return the number of updates per step; 1 if the sizes are refused.
    """
    prompts = read.number("buffer.batch_size", 1)
    read.put("rollout_batch_size", prompts, "buffer.batch_size" if read.get("buffer.batch_size") else "")
    try:
        row = algorithm(str(read.values.get("algorithm_type")))
    except AlgorithmError:
        return 1
    made = prompts * read.number("algorithm.repeat_times", row.repeat or 1)
    share = read.values.get("expert_data_ratio", row.expert_data_ratio)
    whole = round(made / (1 - share)) if isinstance(share, float) and 0 < share < 1 else made
    key = "buffer.train_batch_size"
    update = read.number(key, 0, least=0) or whole
    own = update - round(update * share) if whole != made else update
    if own < 1 or made % own:
        read.diag.error(
            key,
            f"an update has {update} sequences, which is not a divisor of the {made} sequences of a step"
            " (batch_size x repeat_times); write a divisor, or a larger batch_size",
        )
        return 1
    for number in range(min(read.devices, update), 0, -1):
        if update % number == 0 and (number == read.devices or not read.machine.has_gpus):
            break
    else:
        text = f"an update of {update} sequences cannot be split among {read.devices} data-parallel ranks of training"
        read.diag.error(key, f"{text}; change the size of the update or the number of training devices")
        return 1
    if number != read.devices:
        read.devices = number
        read.put("{train}.device_mapping", f"list(range(0,{number}))", key)
        read.put("{infer}.device_mapping", f"list(range(0,{read.machine.devices}))", key)
        read.put("num_gpus_per_node", read.machine.devices)
    each = update // number
    device = next(size for size in range(min(MAX_PER_DEVICE, each), 0, -1) if each % size == 0)
    for role in (read.train, *(["critic"] if "critic" in read.values else [])):
        read.put(f"{role}.training_args.per_device_train_batch_size", device, key if read.get(key) else "")
        read.put(f"{role}.training_args.gradient_accumulation_steps", each // device, key if read.get(key) else "")
    if read.get("explorer.runner_per_model"):
        runners = read.number("explorer.runner_per_model", 8)
        workers = runners if read.machine.has_gpus else min(runners, read.machine.devices)
        read.put("workflow_workers", workers, "explorer.runner_per_model")
    return made // own


def training(read: Translation) -> None:
    """Translate the optimizer, the checkpoints, and the token limits of micro-batches."""
    actor, optimizer = "{train}.training_args", "algorithm.optimizer"
    rate, key = read.first(f"{optimizer}.lr", f"{_ACTOR}.optim.lr", default=1e-6)
    read.put(f"{actor}.learning_rate", rate, key)
    style, style_key = read.first(f"{optimizer}.lr_scheduler_type", f"{optimizer}.warmup_style", default="constant")
    read.put(f"{actor}.lr_scheduler_type", style, style_key)
    if "weight_decay" not in read.values[read.train].get("training_args", {}):
        read.put(f"{actor}.weight_decay", 0.01)
    steps = read.get(f"{optimizer}.lr_warmup_steps", -1)
    if isinstance(steps, int) and steps > 0:
        read.put(f"{actor}.warmup_steps", steps, f"{optimizer}.lr_warmup_steps")
    share, key = read.first(f"{optimizer}.min_lr_ratio", default=0.0)
    if isinstance(share, float | int) and share and isinstance(rate, float) and style != "constant":
        read.put(f"{actor}.lr_scheduler_kwargs", {"min_lr": share * rate}, key)
    betas, key = read.first(f"{optimizer}.betas")
    if isinstance(betas, list) and len(betas) == 2:
        read.put(f"{actor}.adam_beta1", betas[0], f"{key}.0")
        read.put(f"{actor}.adam_beta2", betas[1], f"{key}.1")
    elif betas is not None:
        read.diag.error(key, f"expected two numbers, got {read.diag.as_written(key, betas)}")
    clips = ("trainer.grad_clip", "trainer.actor_grad_clip", f"{_ACTOR}.grad_clip")
    of_optimizer = (f"{optimizer}.clip_grad",)
    is_megatron = read.get("trainer.trainer_strategy") == "megatron"
    read.copy("max_grad_norm", *(of_optimizer + clips if is_megatron else clips + of_optimizer))
    read.copy("ppo_epochs", f"{_ACTOR}.ppo_epochs")
    if "critic" in read.values:
        read.copy("critic_warmup", "trainer.critic_warmup", f"{_VERL}.critic_warmup")
    read.copy("max_ckpt_to_keep", f"{_VERL}.max_actor_ckpt_to_keep")
    read.put("save_steps", *read.first("trainer.save_interval", default=0))
    is_dynamic, because = read.first("trainer.use_dynamic_bsz", f"{_ACTOR}.use_dynamic_bsz", default=True)
    if is_dynamic:
        longest = read.values.get("prompt_length", 0), read.values.get("response_length", 0)
        both = sum(longest) if all(isinstance(length, int) for length in longest) else 0
        names = ("trainer.max_token_len_per_gpu", "trainer.ppo_max_token_len_per_gpu")
        limit, key = read.first(*names, f"{_ACTOR}.ppo_max_token_len_per_gpu", default=2 * both)
        for role in (read.train, *read.frozen):
            for job in ("infer",) if role in ("teacher", "reference") else ("train", "infer"):
                read.put(f"{role}.use_dynamic_batching_in_{job}", True, because or key)
                read.put(f"{role}.max_tokens_per_microbatch_in_{job}", limit, key)


def steps(read: Translation, count: Callable[[list[str]], int]) -> None:
    """Translate the number of steps.

    If it is not set, it is computed from the number of epochs and the number of rows.
    """
    steps, key = read.first("buffer.total_steps", "trainer.total_steps")
    if steps is not None:
        read.put("max_steps", steps, key)
        if "buffer.total_epochs" in read.found:
            read.drop("buffer.total_epochs", f"{key} sets it")
        return
    epochs = read.number("buffer.total_epochs", 1)
    files = read.values.get(read.train, {}).get("data_args", {}).get("file_name") or []
    if read.diag.problems or not files:
        return
    try:
        rows = count(files)
    except ValueError as error:
        read.diag.error(f"{TASKSET}.path", str(error))
        return
    steps = math.floor(epochs * rows / read.values["rollout_batch_size"])
    if steps < 1:
        read.diag.error(
            "buffer.batch_size",
            f"{epochs} epochs of {rows} rows are less than one step of {read.values['rollout_batch_size']}"
            " prompts; lower buffer.batch_size",
        )
    read.put("max_steps", steps, "buffer.total_epochs" if read.get("buffer.total_epochs") else "")
