"""`roll-opd score`: check the model, layout and rows, and compute log-probs with the Megatron engine under torchrun.

A row has tokens, or an answer that is tokenised here.
"""

import argparse
import json
import math
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll_opd.base.command_line import DONE, FAILED, INTERRUPTED, SIZES, USER_ERROR
from roll_opd.base.failures import os_sentence
from roll_opd.base.hub import title_of
from roll_opd.base.paths import PathError, regular_file
from roll_opd.base.terminal import echo
from roll_opd.cluster.lost_processes import ClusterError
from roll_opd.cluster.multihost import torch_ranks
from roll_opd.cluster.multihost.host_facts import LaunchedHost, LaunchError, forget, launched
from roll_opd.cluster.multihost.hosts import Hosts, dismiss
from roll_opd.cluster.multihost.multihost_worker import serve
from roll_opd.cluster.process_reaper import guarded
from roll_opd.cluster.ray_environment import run_temp_directory
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import DataPlan, Layout
from roll_opd.data.row_files import open_file
from roll_opd.data.row_formats import BadRow, DataError
from roll_opd.models.layouts import check_layout
from roll_opd.models.megatron_support import unsupported
from roll_opd.models.model_info import ModelFilesError, ModelInfo, find_model, read_model, whole_model
from roll_opd.models.tokenizer_files import vocabulary_fingerprint
from roll_opd.models.weight_files import lost_weights, weight_problems

PARQUET = ".parquet"


@contextmanager
def tokenised(options: argparse.Namespace) -> Iterator[Path]:
    """Context manager: yield the path of a file whose rows have tokens.

    If the input has answers, they are tokenised and written to a temporary file. Otherwise the path is that of the
    input. Raises DataError for rows that cannot be used.
    """
    source = Path(options.input)
    if has_tokens(source):
        yield source
        return
    from roll_opd.data.dataset import open_prompts  # and transformers
    from roll_opd.data.templates import load_tokenizer

    model = read_model(find_model(options.model))
    rows, _ = open_prompts(
        DataPlan((str(source),), model.max_positions, schema="sft", length_key="max_position_embeddings"),
        load_tokenizer(str(model.path)),
    )
    file = Path(options.output).with_name(f".{Path(options.output).name}.tokens.jsonl")
    try:
        with file.open("w", encoding="utf-8") as out:
            for number in range(len(rows)):
                (row,) = rows.read([number])
                tokens = [*row.tokens.tolist(), *row.answers[0].tolist()]
                out.write(json.dumps({"id": row.id, "tokens": tokens, "prompt_length": len(row.tokens)}) + "\n")
        yield file
    finally:
        file.unlink(missing_ok=True)


def has_tokens(path: Path) -> bool:
    """Return whether the rows of a file have tokens. Only the first row is read.

    The result is also True if this row cannot be decoded or has no column of an answer. The reader of token rows then
    raises the error.
    """
    try:
        _, _, row = next(open_file(str(path)).scan(), (0, 0, {}))
    except (OSError, DataError):
        return True
    answers = {"messages", "conversations", "prompt", "instruction"}
    return not isinstance(row, dict) or "tokens" in row or answers.isdisjoint(row)


def teacher_file(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the arguments of `TeacherWriter`, except `output`. None if the output is a JSONL file of log-probs."""
    if not options.output.endswith(PARQUET):
        return None
    from roll_opd.data.teacher_files import digest_of

    model = read_model(find_model(options.model))
    facts = {
        "teacher": options.name or title_of(model.path),
        "tokenizer": vocabulary_fingerprint(model.path),
        "temperature": options.temperature,
    }
    settings = {
        "model": str(model.path),
        "dtype": options.dtype,
        "input": digest_of(Path(options.input)),
    }
    vocabulary = min(options.vocab_size or model.vocab, model.vocab)
    return {"facts": facts, "topk": options.topk, "vocab_size": vocabulary, "settings": settings}


# configuration key in errors about layouts -> option of this command
OPTIONS = {
    "tensor_model_parallel_size": "--tp",
    "virtual_pipeline_model_parallel_size": "--vpp",
    "pipeline_model_parallel_size": "--pp",
    "expert_model_parallel_size": "--ep",
    "expert_tensor_parallel_size": "--expert-tp",
}
KEYS = re.compile("|".join(OPTIONS))
ROWS_NAMED = 5  # number of bad rows that get a message each; further rows are only counted


def run(options: argparse.Namespace) -> int:
    """Score the rows. Return 0, or 2 for invalid input (nothing started), or 1 if torchrun fails.

    If the command is launched on several hosts, each host runs some of the ranks. Host 0 reads the rows and writes the
    results.
    """
    try:
        host = launched(os.environ)
    except LaunchError as error:
        return _fail(str(error), USER_ERROR)
    forget(os.environ)
    if host and host.rank:
        return serve(host, lambda text: echo(text, sys.stderr))
    size = host.size if host else 1
    if problems := _problems(options, size):
        if host:
            dismiss(host, USER_ERROR)
        return _fail("\n  ".join(problems), USER_ERROR)
    left_out = ("command", "run", "host_timeout_s")
    settings = {name: value for name, value in vars(options).items() if name not in left_out}
    settings["layout"] = asdict(_layout(options))
    settings["model"] = str(find_model(options.model))
    try:
        with tokenised(options) as rows:
            settings |= {"input": str(rows), "teacher_file": teacher_file(options)}
            return _start(options, host, settings, size)
    except (DataError, ModelFilesError) as error:
        if host:
            dismiss(host, USER_ERROR)
        return _fail(str(error), USER_ERROR)


def _start(options: argparse.Namespace, host: LaunchedHost | None, settings: dict[str, Any], size: int) -> int:
    """Run the ranks on this host, or on all hosts if there are several. Return the exit code."""
    ranks = math.prod(getattr(options, name) for name in SIZES) // size
    command = {
        "ranks": ranks,
        "hosts": size,
        "module": "roll_opd.megatron.score_file",
        "arguments": [json.dumps(settings)],
    }
    if host:
        return _over_hosts(host, command, settings["model"], options.host_timeout_s)
    with guarded() as reaper, run_temp_directory(reaper):
        return FAILED if torch_ranks.start(command).wait() else DONE


def _over_hosts(host: LaunchedHost, command: dict[str, Any], model: str, seconds: float) -> int:
    code = FAILED
    try:
        hosts = Hosts(host)
    except LaunchError as error:
        return _fail(str(error), USER_ERROR)
    try:
        hosts.gather(seconds, echo)
        hosts.download([model])
        hosts.check([model], None, command["ranks"])
        with socket.create_server(("", 0)) as free:
            command |= {"address": host.address, "port": free.getsockname()[1], "host": 0}
        with guarded() as reaper, run_temp_directory(reaper):
            hosts.start_ranks(command)
            process = torch_ranks.start({**command, "here": host.own_address()})

            def lost(why: str) -> None:
                if process.poll() is None:  # the ranks of this host have not ended
                    _fail(why, FAILED)
                    process.terminate()  # these ranks wait for lost ranks

            hosts.watch(lost)
            code = FAILED if process.wait() else DONE
    except (LaunchError, ClusterError) as error:
        code = _fail(str(error), USER_ERROR if isinstance(error, LaunchError) else FAILED)
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        hosts.end(code)
    return code


def _fail(text: str, code: int) -> int:
    echo(f"roll-opd score: {text}", sys.stderr)
    return code


def _problems(options: argparse.Namespace, hosts: int) -> list[str]:
    diagnostics = Diagnostics()
    if math.prod(getattr(options, name) for name in SIZES) % hosts:
        diagnostics.error("--dp", f"tp x pp x cp x dp ranks are not divisible by the {hosts} hosts; change one of them")
    for name in (*SIZES, "ep", "vpp", "expert_tp"):
        size = getattr(options, name)
        if size is not None and size < 1:
            diagnostics.error(f"--{name.replace('_', '-')}", f"{size} is not a size; give 1 or more")
    if not 0 < options.host_timeout_s < math.inf:
        diagnostics.error("--host-timeout-s", f"{options.host_timeout_s} must be a number greater than 0")
    if not 0 < options.temperature < math.inf:
        diagnostics.error("--temperature", f"{options.temperature} must be a number greater than 0")
    if options.max_tokens_per_microbatch < 1:
        diagnostics.error("--max-tokens-per-microbatch", "must be at least 1")
    _check_teacher_file(options, diagnostics)
    if Path(options.output).is_dir():
        diagnostics.error("--output", f"{options.output} is a directory; name a file")
    if not Path(options.output).absolute().parent.is_dir():
        diagnostics.error("--output", f"there is no directory {Path(options.output).absolute().parent}")
    if _is_same_file(options.input, options.output):
        diagnostics.error(
            "--output", f"{options.output} is the file of --input, which would be overwritten; name another file"
        )
    try:
        info = read_model(whole_model(options.model, echo))
    except ModelFilesError as error:
        return [*diagnostics.problems, f"--model: {error}"]
    if diagnostics.problems:
        return diagnostics.problems
    _check_model(info, options, diagnostics)
    if has_tokens(Path(options.input)):
        _check_rows(Path(options.input), info, min(options.vocab_size or info.vocab, info.vocab), diagnostics)
    return diagnostics.problems


def _check_teacher_file(options: argparse.Namespace, diagnostics: Diagnostics) -> None:
    """Check the options of a teacher file in parquet."""
    is_parquet = options.output.endswith(PARQUET)
    for name in ("topk", "vocab_size"):
        if (size := getattr(options, name)) is not None and size < 1:
            diagnostics.error(f"--{name.replace('_', '-')}", f"{size} is not a number of tokens; give 1 or more")
    if options.topk and options.vocab_size and options.topk > options.vocab_size:
        diagnostics.error("--topk", f"{options.topk} is more than --vocab-size {options.vocab_size}; lower it")
    for name in ("topk", "name"):
        if getattr(options, name) is not None and not is_parquet:
            diagnostics.error(f"--{name}", f"is written only to parquet, but --output is {options.output}")


def _layout(options: argparse.Namespace) -> Layout:
    vpp = options.vpp if options.vpp > 1 else None  # one virtual stage per rank is no virtual pipeline
    sizes = {name: getattr(options, name) for name in SIZES}
    return Layout(**sizes, ep=options.ep, vpp=vpp, etp=options.expert_tp)


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False  # a missing file is reported later


def _check_model(info: ModelInfo, options: argparse.Namespace, diagnostics: Diagnostics) -> None:
    for sentence in (*unsupported(info.path), *weight_problems(info), *lost_weights(info)):
        diagnostics.error("--model", sentence)
    if options.topk and options.topk > info.vocab:
        diagnostics.error("--topk", f"{options.topk} is more than the {info.vocab} tokens of the vocabulary; lower it")
    of_layout = Diagnostics()
    check_layout(info, _layout(options), {}, of_layout)
    diagnostics.problems.extend(KEYS.sub(lambda found: OPTIONS[found[0]], problem) for problem in of_layout.problems)
    if options.expert_tp and not info.experts:
        diagnostics.error("--expert-tp", f"{info.path.name} is a dense model without experts; remove the option")


def _check_rows(path: Path, info: ModelInfo, scored: int, diagnostics: Diagnostics) -> None:
    """Check the rows of the input. `scored` is the number of token ids over which log-probs are normalised."""
    bad = rows = 0
    try:
        for number, _, row in open_file(str(regular_file(path))).scan():
            rows += 1
            reason = _bad_row(row, info, scored)
            bad += reason is not None
            if reason and bad <= ROWS_NAMED:
                diagnostics.error(f"--input {path}:{number}", reason)
    except OSError as error:
        diagnostics.error("--input", os_sentence(error))
        return
    except (PathError, DataError) as error:
        diagnostics.error("--input", str(error))
        return
    if bad > ROWS_NAMED:
        diagnostics.error("--input", f"{bad - ROWS_NAMED} more of the {rows} rows are bad")
    if not rows:
        diagnostics.error("--input", f"{path} has no rows")


def _bad_row(row: Any, info: ModelInfo, scored: int) -> str | None:
    if isinstance(row, BadRow):
        return f'not a row {{"id", "tokens", "prompt_length"}}: {row.kind}: {row.detail}'
    try:
        tokens, prompt_length, _ = row["tokens"], row["prompt_length"], row["id"]
    except (TypeError, KeyError) as error:
        return f'not a row {{"id", "tokens", "prompt_length"}}: {error!r}'
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        return "tokens must be a list of integers"
    if type(prompt_length) is not int or not 1 <= prompt_length <= len(tokens):
        return f"prompt_length {prompt_length!r} must be 1 to the number of tokens ({len(tokens)})"
    outside = [token for token in tokens if not 0 <= token < info.vocab]
    if outside:
        return f"token {outside[0]} is outside the vocabulary of {info.vocab}"
    if (largest := max(tokens[prompt_length:], default=0)) >= scored:
        return f"token {largest} has no log-prob with --vocab-size {scored}; raise it, or remove the row"
    if len(tokens) > info.max_positions:
        return f"{len(tokens)} tokens are more than the model's {info.max_positions} positions"
    return None
