"""Read and check the lengths of sequences and the sizes of batches: steps, mini-batches and micro-batches.

These functions read no files and raise no exceptions. Problems are recorded in the section that has the key.
"""

from collections.abc import Sequence

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import MicroBatchLimits, RolloutPlan
from roll_opd.config.schema import GeneratingArgs, Run, Supervised, Top, TrainingArgs, Worker, changed
from roll_opd.models.memory import VLLM_MAX_SEQUENCES
from roll_opd.planner.layouts_and_devices import OPTIONS
from roll_opd.planner.validate_sections import Sections

SHARE_TOLERANCE = 0.05  # largest error of a sum of shares: thirds may be written as 0.333
MAX_SEQUENCES = 10**7  # sequences of a step, limited by the driver's memory


def read_sizes(sections: Sections, top: Top) -> Top:
    """Return `top` with lengths and responses per prompt; set the mini-batches of the trained roles.

    The sizes must fit the models and each other.
    """
    args = sections.infer.generating_args if sections.infer else GeneratingArgs()
    top = changed(top, {"responses": _responses_per_prompt(top, args), "held_out_tokens": _held_out_length(top)})
    top = changed(top, {"response_tokens": _response_length(top, args)})
    if sections.infer:
        _check_sampling(args)
    if top.response_tokens is not None:
        _check_lengths(top, sections, args, top.response_tokens)
        check_micro_batches(sections.all(), top.longest)
    if train := sections.train:
        sections.train = changed(train, {"mini_batch": _mini_batch(top, train, top.expert_data_ratio or 0.0)})
    if critic := sections.critic:
        sections.critic = changed(critic, {"mini_batch": _mini_batch(top, critic)})
    return top


def _responses_per_prompt(top: Top, args: GeneratingArgs) -> int:
    """Return the number of responses per prompt.

    This is num_return_sequences_in_group or, if it is not set, the rollout's num_return_sequences.
    """
    own, group = args.num_return_sequences, top.num_return_sequences_in_group
    if own is not None and group is not None and own != group:
        text = f"{own} contradicts num_return_sequences_in_group {group}; keep only one of these keys"
        args.diag.error("num_return_sequences", text)
    return group or own or 1


def _response_length(top: Top, args: GeneratingArgs) -> int | None:
    """Return the maximum number of tokens in a response.

    This is response_length, or sequence_length minus prompt_length. A smaller `max_new_tokens` of the rollout applies
    instead.
    """
    written, length = args.max_new_tokens, top.response_length
    if length is None and top.sequence_length is not None:
        length = top.sequence_length - top.prompt_length
        if length < 1:
            top.diag.error(
                "sequence_length",
                f"{top.sequence_length} leaves no response after prompt_length {top.prompt_length}; raise it",
            )
            return None
    length = length or written
    if length is None:
        top.diag.error("response_length", "is missing; write response_length or sequence_length")
        return None
    if top.sequence_length is not None and top.prompt_length + length > top.sequence_length:
        top.diag.error(
            "sequence_length",
            f"{top.sequence_length} is less than prompt_length {top.prompt_length} + {length}; raise or remove it",
        )
    if written is not None and written != length:
        args.diag.warn(
            "max_new_tokens",
            f"{written} is not the response length {length}; the smaller one applies (ROLL uses the response length)",
        )
    return min(written or length, length)


def _held_out_length(top: Top) -> int | None:
    """Return the configured maximum number of tokens in an answer in validation.

    The result is None if the maximum of training applies. val_sequence_length minus val_prompt_length overrides all
    other keys, as in ROLL.
    """
    args = top.validation.generating_args if top.validation else GeneratingArgs()
    written, prompt, both = args.max_new_tokens, top.val_prompt_length, top.val_sequence_length
    if prompt is None and both is None:
        return written
    if prompt is None or both is None:
        missing = "val_prompt_length" if prompt is None else "val_sequence_length"
        top.diag.error(missing, "is missing; write both val_prompt_length and val_sequence_length, or neither")
        return written
    if both <= prompt:
        top.diag.error("val_sequence_length", f"{both} leaves no room after val_prompt_length {prompt}; raise it")
        return written
    if written not in (None, both - prompt):
        args.diag.warn(
            "max_new_tokens",
            f"{written} has no effect: as in ROLL, val_sequence_length - val_prompt_length leaves {both - prompt}"
            " tokens",
        )
    return both - prompt


def _check_lengths(top: Top, roles: Sections, args: GeneratingArgs, response: int) -> None:
    """Check the lengths of responses and of held-out answers against the models and max_model_len."""
    held_out, infer = top.held_out_tokens, roles.infer
    key = args.diag.at("max_new_tokens") if args.max_new_tokens else "response_length"
    its_own = "val_sequence_length" if top.val_sequence_length else "validation.generating_args.max_new_tokens"
    for new, its_key in ((response, key), (held_out, its_own)):
        if new:
            what = f"prompt_length {top.prompt_length} + {new} new tokens"
            check_positions(top, roles.all(), top.prompt_length + new, what, its_key)
    needed = top.prompt_length + max(response, held_out or 0)
    length = infer.max_model_len if infer else None
    if infer is None or length is None:
        return
    key = f"{OPTIONS}.max_model_len"
    if length <= top.prompt_length:
        text = f"{length} leaves no token for a response after a prompt of {top.prompt_length}; raise or remove it"
        infer.diag.error(key, text)
    elif length < needed:
        text = f"cuts sequences of up to {needed} tokens at {length}, as in ROLL: long prompts shorten the response"
        infer.diag.warn(key, text)
    if infer.info is not None and length > infer.info.max_positions:
        text = f"{length} is more than the model's {infer.info.max_positions} positions"
        infer.diag.error(key, f"{text} ({infer.info.positions_key}); lower it")


def check_batched_tokens(engine: RolloutPlan, diag: Diagnostics, on_cpu: bool) -> None:
    """Check the maximum number of tokens in an engine step, like vLLM's `SchedulerConfig.verify_max_model_len`.

    An engine on CPUs never splits a prompt, and its default of `max_num_seqs` is different.
    """
    key, args, longest = f"{OPTIONS}.max_num_batched_tokens", engine.engine_args, engine.max_model_len
    tokens, sequences, whole = args.get("max_num_batched_tokens"), args.get("max_num_seqs"), "enable_chunked_prefill"
    if tokens is None:
        return
    if sequences and tokens < sequences:
        text = f"{tokens} is less than one token for each of the {sequences} sequences of max_num_seqs"
        diag.error(key, f"{text} (or max_running_requests), which vLLM refuses; raise it")
    elif tokens < longest and args.get(whole) is False:
        text = f"{tokens} cannot hold a sequence of {longest} tokens (max_model_len), and {whole} is false"
        diag.error(key, f"{text}, which vLLM refuses; raise it, or remove {whole}")
    elif on_cpu and tokens < (least := max(longest, 0 if sequences else VLLM_MAX_SEQUENCES)):
        text = f"{tokens} is less than the {least} that an engine without a GPU needs"
        diag.unsupported_here(key, f"{text} for the longest sequence, and one token of each; raise or remove this key")


def check_positions(top: Run, roles: list[Worker], tokens: int, what: str, key: str) -> None:
    """Check that a sequence of `tokens` tokens fits into the positions of every model.

    `what` describes the tokens in the error message.
    """
    models = {role.info.path: role.info for role in roles if role.info}
    small = [info for info in models.values() if tokens > info.max_positions]
    if small:
        short = " and ".join(f"{info.path.name} ({info.max_positions})" for info in small)
        keys = " and ".join(sorted({info.positions_key for info in small}))
        text = f"{what} is more than the positions of {short}; lower it ({keys} in the model's config.json)"
        top.diag.error(key, text)


def _check_sampling(args: GeneratingArgs) -> None:
    """Check the sampling of the rollout.

    Greedy decoding is refused. Settings that change the distribution of the model cause a warning.
    """
    if args.temperature == 0:
        args.diag.error("temperature", "0 does not sample: the student would train on a single answer; use 1")
    reshaped = {"top_p": args.top_p != 1, "top_k": args.top_k > 0, "repetition_penalty": args.repetition_penalty != 1}
    names = [f"{name} {getattr(args, name)}" for name in reshaped if reshaped[name]]
    if names:
        args.diag.note(
            "",
            f"{', '.join(names)}: the rollout's log-probs are of the distribution after this change, but the log-probs"
            " of teacher and training engine are of the full distribution; with top_p 1, top_k -1 and"
            " repetition_penalty 1 they are comparable"
            + (
                "; with a repetition penalty, engine_check tests no samples, but only the weights that engines receive"
                if reshaped["repetition_penalty"]
                else ""
            ),
        )


def demonstration_rows(mini_batch: int, share: float) -> int:
    """Return the number of demonstrations in an update of `mini_batch` sequences."""
    return round(mini_batch * share)


def _per_update(args: TrainingArgs, dp: int) -> tuple[int, str]:
    """Return (sequences, text): the number of sequences in an update, and its computation as text.

    `dp` is the number of data-parallel ranks.
    """
    device, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    arithmetic = (
        f"(per_device_train_batch_size {device} x gradient_accumulation_steps {steps} x data-parallel size {dp})"
    )
    return device * steps * dp, arithmetic


def _mini_batch(top: Top, train: Worker, share: float = 0.0) -> int | None:
    """Return the number of sequences in one optimizer update, over all data-parallel ranks.

    The fraction `share` of these sequences are demonstrations, and the rest are samples of the step. A step must be a
    multiple of the mini-batch. If the pipeline makes tasks, this is only a warning, because the number of samples
    per trajectory is not known in advance.
    """
    if train.layout is None:
        return None
    args, dp = train.training_args, train.layout.dp
    mini, arithmetic = _per_update(args, dp)
    n = top.responses
    sequences = top.rollout_batch_size * n
    if sequences > MAX_SEQUENCES:
        top.diag.error(
            "rollout_batch_size",
            f"{top.rollout_batch_size} prompts x {n} responses are more than the {MAX_SEQUENCES:,} sequences that a"
            " step can"
            " hold; lower one of the two numbers",
        )
        return None
    given = demonstration_rows(mini, share)
    if share and not (abs(mini * share - given) <= SHARE_TOLERANCE and 0 < given < mini):
        top.diag.error(
            "expert_data_ratio",
            f"{share:g} of the mini-batch {mini} {arithmetic} is {mini * share:g} demonstrations,"
            " not a whole number between 0 and the mini-batch; change one of them",
        )
        return None
    if top.makes_tasks and sequences % mini:
        top.diag.note(
            "rollout_batch_size",
            f"{sequences} trajectories per step are no multiple of the mini-batch {mini}; a step's last update is"
            " smaller",
        )
        return min(mini, sequences)
    if sequences % (mini - given):
        left = f"the {mini - given} that {given} demonstrations leave in " if given else ""
        advice = (
            "change one of the two numbers" if given else _fitting(sequences, args.per_device_train_batch_size * dp)
        )
        top.diag.error(
            "rollout_batch_size",
            f"{top.rollout_batch_size} prompts x {n} responses = {sequences} sequences per step are not a multiple of"
            f" {left}{train.path}'s mini-batch of {mini} {arithmetic}; {advice}",
        )
        return None
    return mini


def rows_per_step(top: Supervised, train: Worker) -> tuple[int, int]:
    """Return (step, update) for a run on rows with answers.

    These are the number of rows in a step and the number of rows in an optimizer update.
    """
    dp = train.layout.dp if train.layout else 1
    update, arithmetic = _per_update(train.training_args, dp)
    rows = top.train_batch_size or update
    if rows % update:
        top.diag.error(
            "train_batch_size",
            f"{rows} is not a multiple of an update's {update} rows {arithmetic}; change one of the two numbers, or"
            " remove it",
        )
    return rows, update


def _fitting(sequences: int, share: int) -> str:
    """Return advice for an error message: fitting values of gradient_accumulation_steps, or another key to change."""
    if sequences % share:
        return f"make the sequences per step a multiple of {share}, or change device_mapping"
    steps = sequences // share
    divisors = [str(step) for step in range(1, steps + 1) if steps % step == 0]
    return f"gradient_accumulation_steps could be {', '.join(divisors[-6:])}"


def check_micro_batches(roles: Sequence[Worker], longest: int, answers: int = 0) -> None:
    """Check that the longest sequence fits into a micro-batch.

    In training, the answers of a row stay together in a micro-batch. `answers` is the number of answers in a row.
    """
    what = "one sequence of prompt + " + ("answer" if answers else "response")
    for role in roles:
        if role.job != "rollout":
            _check_micro_batch(role, False, longest, what)
        if role.job == "train":
            pair = "a pair, which stays together" if answers > 1 else what
            _check_micro_batch(role, True, longest * max(answers, 1), pair)


def _check_micro_batch(worker: Worker, training: bool, longest: int, what: str) -> None:
    key, tokens = _token_limit(worker, training)
    switch = f"use_dynamic_batching_in_{'train' if training else 'infer'}"
    if getattr(worker, switch) and not tokens:
        worker.diag.error(key, f"is missing and {switch} needs it; write a number of tokens")
    if tokens and tokens < longest:
        worker.diag.error(key, f"{tokens} tokens cannot hold {what} ({longest} tokens); raise it")


def _token_limit(worker: Worker, training: bool) -> tuple[str, int | None]:
    """Return (key, value) of the limit on the tokens of a micro-batch.

    The result is ("", None) if the limit is a number of sequences.
    """
    job = "train" if training else "infer"
    if getattr(worker, f"use_dynamic_batching_in_{job}"):
        key = f"max_tokens_per_microbatch_in_{job}"
        return key, getattr(worker, key)
    if worker.use_sequence_packing:
        key = f"max_packed_sequence_length_{'train' if training else 'forward'}"
        return f"sequence_packing_args.{key}", getattr(worker.sequence_packing_args, key)
    return "", None


def micro_batch(worker: Worker, training: bool) -> MicroBatchLimits:
    """Return the limit of a micro-batch.

    It is a number of tokens with dynamic batching or sequence packing. Otherwise it is a number of sequences.
    """
    if tokens := _token_limit(worker, training)[1]:
        return MicroBatchLimits(tokens=tokens)
    size = worker.training_args.per_device_train_batch_size if training else worker.infer_batch_size
    return MicroBatchLimits(sequences=size)
