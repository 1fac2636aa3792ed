"""Checks of values: lengths, sampling and batches.

Every function takes what it needs and writes sentences into `Diagnostics`; none raises, none touches the disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from roll_opd.config.errors import Diagnostics
from roll_opd.config.plan import MicroBatchLimits
from roll_opd.config.roles import Role, Roles
from roll_opd.config.schema import GeneratingArgs, Supervised, Top, Worker, changed


def response_length(top: Top, infer: Worker | None, infer_path: str, diagnostics: Diagnostics) -> int | None:
    """Return the tokens a response may have: response_length, or sequence_length less the prompt."""
    asked = infer.generating_args.max_new_tokens if infer else None
    length = top.response_length
    if length is None and top.sequence_length is not None:
        length = top.sequence_length - top.prompt_length
        if length < 1:
            diagnostics.problem(
                "sequence_length",
                f"{top.sequence_length} leaves no room after prompt_length {top.prompt_length}; raise it",
            )
            return None
    length = length or asked
    if length is None:
        diagnostics.problem("response_length", "is missing; write response_length or sequence_length")
        return None
    if top.sequence_length is not None and top.prompt_length + length > top.sequence_length:
        diagnostics.problem(
            "sequence_length",
            f"{top.sequence_length} is less than prompt_length {top.prompt_length} + response_length {length};"
            " raise it or leave it out",
        )
    if asked is not None and asked != length:
        diagnostics.say(
            f"{infer_path}.generating_args.max_new_tokens",
            f"{asked} and the response length {length} differ, and the smaller counts (in ROLL the response length)",
        )
    return min(asked or length, length)


def held_out_length(top: Top, diagnostics: Diagnostics) -> int | None:
    """Return the tokens that an answer in validation may have, as written; None: those of a response.

    With val_sequence_length they are what it leaves after val_prompt_length, whatever else is written, as in ROLL.
    """
    asked = top.validation.generating_args.max_new_tokens if top.validation else None
    if top.val_prompt_length is None and top.val_sequence_length is None:
        return asked
    if top.val_prompt_length is None or top.val_sequence_length is None:
        missing = "val_prompt_length" if top.val_prompt_length is None else "val_sequence_length"
        diagnostics.problem(missing, "is missing; write both val_prompt_length and val_sequence_length, or neither")
        return asked
    length = top.val_sequence_length - top.val_prompt_length
    if length < 1:
        diagnostics.problem(
            "val_sequence_length",
            f"{top.val_sequence_length} leaves no room after val_prompt_length {top.val_prompt_length}; raise it",
        )
        return asked
    if asked not in (None, length):
        diagnostics.say(
            "validation.generating_args.max_new_tokens",
            f"{asked} has no effect beside val_sequence_length, which leaves {length}, as in ROLL",
        )
    return length


def check_lengths(top: Top, roles: Roles, held_out: int | None, diagnostics: Diagnostics) -> int | None:
    """Return the rollout's max_new_tokens, after checking it and that of `held_out` answers against the models."""
    infer = roles.infer
    response = response_length(top, infer.worker if infer else None, infer.path if infer else "", diagnostics)
    if infer is not None:
        check_sampling(infer.worker.generating_args, f"{infer.path}.generating_args", diagnostics)
    if response is None:
        return None
    written = infer is not None and infer.worker.generating_args.max_new_tokens
    key = f"{infer.path}.generating_args.max_new_tokens" if infer and written else "response_length"
    its_own = "val_sequence_length" if top.val_sequence_length else "validation.generating_args.max_new_tokens"
    for new, its_key in ((response, key), (held_out, its_own)):
        if new:
            what = f"prompt_length {top.prompt_length} + {new} new tokens"
            check_positions(roles.all(), top.prompt_length + new, what, its_key, diagnostics)
    if infer is not None:
        check_model_length(infer, top.prompt_length + max(response, held_out or 0), diagnostics)
    return response


@dataclass(frozen=True)
class Sizes:
    """How much a step of a rollout is; what could not be told is None."""

    n: int  # responses a prompt
    response: int | None  # tokens of the longest one
    held_out: int | None  # of the longest one in validation; None: as many
    mini_batch: int | None  # sequences behind an update of the student
    critic_mini_batch: int | None


def read_sizes(top: Top, roles: Roles, agentic: bool, diagnostics: Diagnostics) -> Sizes:
    """Return lengths and batches, checked against the models and against each other."""
    n = responses_per_prompt(top, roles.infer, diagnostics)
    held_out = held_out_length(top, diagnostics)
    response = check_lengths(top, roles, held_out, diagnostics)
    share = top.expert_data_ratio or 0.0
    mini = mini_batch(top, roles.train, n, agentic, diagnostics, share) if roles.train else None
    critic_mini = mini_batch(top, roles.critic, n, agentic, diagnostics) if roles.critic else None
    if response is not None:
        check_micro_batches(roles.all(), top.prompt_length + response, diagnostics)
    return Sizes(n, response, held_out, mini, critic_mini)


def turn_lengths(top: Top, infer: Role | None) -> Top:
    """Return `top` with lengths that add up to the whole trajectory of an agentic run.

    `max_new_tokens` is what one turn may say; everything before a turn is its prompt.
    """
    turn = infer.worker.generating_args.max_new_tokens if infer else None
    if top.sequence_length is None or turn is None or turn >= top.sequence_length:
        return top
    return changed(top, {"prompt_length": top.sequence_length - turn, "response_length": turn})


def responses_per_prompt(top: Top, infer: Role | None, diagnostics: Diagnostics) -> int:
    """Return the group size, or the rollout's num_return_sequences where only that is written."""
    own = infer.worker.generating_args.num_return_sequences if infer else None
    group = top.num_return_sequences_in_group
    if infer and own is not None and group is not None and own != group:
        diagnostics.problem(
            f"{infer.path}.generating_args.num_return_sequences",
            f"{own} contradicts num_return_sequences_in_group {group}; write one of them",
        )
    return group or own or 1


def check_positions(roles: list[Role], tokens: int, what: str, key: str, diagnostics: Diagnostics) -> None:
    """Check that `tokens` fit into the positions of every model; `what` they are is for the sentence."""
    models = {role.info.path: role.info for role in roles if role.info}
    short = [f"{info.path.name} ({info.max_positions})" for info in models.values() if tokens > info.max_positions]
    if short:
        diagnostics.problem(
            key,
            f"{what} is more than the positions of {' and '.join(short)}; lower it"
            " (max_position_embeddings in the model's config.json says how many there are)",
        )


def check_model_length(infer: Role, needed: int, diagnostics: Diagnostics) -> None:
    """Check a max_model_len that the user wrote: enough for prompt + response, no more than the model has."""
    length = infer.vllm.max_model_len if infer.vllm else None
    if length is None:
        return
    key = f"{infer.path}.strategy_args.strategy_config.max_model_len"
    if length < needed:
        diagnostics.problem(key, f"{length} would cut sequences of up to {needed} tokens; leave it out or raise it")
    if infer.info is not None and length > infer.info.max_positions:
        diagnostics.problem(key, f"{length} is more than the model's {infer.info.max_positions} positions; lower it")


def check_sampling(args: GeneratingArgs, key: str, diagnostics: Diagnostics) -> None:
    """Check the rollout's sampling: it must sample, and warn where it is not the model's own distribution."""
    if args.temperature == 0:
        diagnostics.problem(
            f"{key}.temperature", "0 does not sample: the student would learn from one answer only; use 1"
        )
    reshaped = {"top_p": args.top_p != 1, "top_k": args.top_k > 0, "repetition_penalty": args.repetition_penalty != 1}
    names = [f"{name} {getattr(args, name)}" for name in reshaped if reshaped[name]]
    if names:
        diagnostics.warn(
            f"{key}: {', '.join(names)}: rollout log-probs are those of a truncated distribution, the teacher's and"
            " the training engine's are not; top_p 1, top_k -1, repetition_penalty 1 keep them comparable"
        )


SHARE_TOLERANCE = 0.05  # of a row: thirds may be written as 0.333
MOST_SEQUENCES = 10**7  # of a step: all of them are in the driver's memory at once


def demonstration_rows(mini_batch: int, share: float) -> int:
    """Return how many of the sequences of an update are demonstrations."""
    return round(mini_batch * share)


def mini_batch(
    top: Top, train: Role, n: int, agentic: bool, diagnostics: Diagnostics, share: float = 0.0
) -> int | None:
    """Return the sequences behind one optimizer update, over all data-parallel ranks.

    `share` of them are demonstrations, and the step's samples fill the rest. Agentic runs do not know how many samples
    their trajectories give, so there a remainder is only a warning.
    """
    if train.megatron is None or train.megatron.layout is None:
        return None
    args, dp = train.worker.training_args, train.megatron.layout.dp
    mini = args.per_device_train_batch_size * args.gradient_accumulation_steps * dp
    sequences = top.rollout_batch_size * n
    if sequences > MOST_SEQUENCES:
        diagnostics.problem(
            "rollout_batch_size",
            f"{top.rollout_batch_size} prompts x {n} responses are more than the {MOST_SEQUENCES:,} sequences that a"
            " step can hold; lower one of them",
        )
        return None
    arithmetic = (
        f"per_device_train_batch_size {args.per_device_train_batch_size} x gradient_accumulation_steps"
        f" {args.gradient_accumulation_steps} x data-parallel size {dp}"
    )
    given = demonstration_rows(mini, share)
    if share and not (abs(mini * share - given) <= SHARE_TOLERANCE and 0 < given < mini):
        diagnostics.problem(
            "expert_data_ratio",
            f"{share:g} of a mini-batch of {mini} sequences ({arithmetic}) is {mini * share:g} demonstrations; change"
            " one of them, so that whole rows of both demonstrations and samples are in it",
        )
        return None
    if agentic and sequences % mini:
        diagnostics.warn(
            f"rollout_batch_size: {sequences} trajectories a step are no multiple of the mini-batch of {mini}; the"
            " last update of a step is smaller"
        )
        return min(mini, sequences)
    if sequences % (mini - given):
        left = f"the {mini - given} that {given} demonstrations leave in " if given else ""
        advice = "change one of them" if given else _fitting(sequences, args.per_device_train_batch_size * dp)
        diagnostics.problem(
            "rollout_batch_size",
            f"{top.rollout_batch_size} prompts x {n} responses = {sequences} sequences a step are no multiple of"
            f" {left}{train.path}'s mini-batch of {mini} ({arithmetic}); {advice}",
        )
        return None
    return mini


def rows_per_step(top: Supervised, train: Role, diagnostics: Diagnostics) -> tuple[int, int]:
    """Return the rows of a step and those behind one optimizer update, of a run over rows with answers."""
    args = train.worker.training_args
    dp = train.megatron.layout.dp if train.megatron and train.megatron.layout else 1
    update = args.per_device_train_batch_size * args.gradient_accumulation_steps * dp
    rows = top.train_batch_size or update
    if rows % update:
        diagnostics.problem(
            "train_batch_size",
            f"{rows} rows a step are no multiple of the {update} of one update (per_device_train_batch_size"
            f" {args.per_device_train_batch_size} x gradient_accumulation_steps {args.gradient_accumulation_steps} x"
            f" data-parallel size {dp}); change one of them, or leave train_batch_size out",
        )
    return rows, update


def _fitting(sequences: int, share: int) -> str:
    """Say which gradient_accumulation_steps would fit, or what else to change."""
    if sequences % share:
        return f"make the sequences a step a multiple of {share}, or change device_mapping"
    steps = sequences // share
    divisors = [str(step) for step in range(1, steps + 1) if steps % step == 0]
    return f"gradient_accumulation_steps could be {', '.join(divisors[-6:])}"


def check_micro_batches(roles: Sequence[Role], longest: int, diagnostics: Diagnostics, answers: int = 0) -> None:
    """Check that the longest sequence fits into every micro-batch; `answers` of a row stay together in training."""
    what = "one sequence of prompt + " + ("answer" if answers else "response")
    for role in roles:
        if role.job != "rollout":
            micro_batch(role, False, longest, diagnostics, what)
        if role.job == "train":
            pair = "a pair, which stays together" if answers > 1 else what
            micro_batch(role, True, longest * max(answers, 1), diagnostics, pair)


def micro_batch(role: Role, training: bool, longest: int, diagnostics: Diagnostics, what: str = "") -> MicroBatchLimits:
    """Return how much goes through at once: tokens with dynamic batching or packing, else sequences.

    `longest` is the tokens of the largest thing that is not cut; `what` that is, is for the sentence.
    """
    worker, job = role.worker, "train" if training else "infer"
    packing = worker.sequence_packing_args
    dynamic = worker.use_dynamic_batching_in_train if training else worker.use_dynamic_batching_in_infer
    key = f"{role.path}.max_tokens_per_microbatch_in_{job}"
    tokens = None
    if dynamic:
        tokens = worker.max_tokens_per_microbatch_in_train if training else worker.max_tokens_per_microbatch_in_infer
        if not tokens:
            diagnostics.problem(key, f"is missing; use_dynamic_batching_in_{job} needs it, write a number of tokens")
    elif worker.use_sequence_packing:
        tokens = packing.max_packed_sequence_length_train if training else packing.max_packed_sequence_length_forward
        name = "train" if training else "forward"
        key = f"{role.path}.sequence_packing_args.max_packed_sequence_length_{name}"
    if tokens and tokens < longest:
        diagnostics.problem(key, f"{tokens} tokens cannot hold {what} ({longest} tokens); raise it")
    if tokens:
        return MicroBatchLimits(tokens=tokens)
    size = worker.training_args.per_device_train_batch_size if training else worker.infer_batch_size
    return MicroBatchLimits(sequences=size)
