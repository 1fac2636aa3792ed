"""`roll-opd serve`: start a vLLM server that computes a teacher's log-probs.

A run on another machine requests the log-probs from the server (`teacher.http`).
"""

import argparse
import os
import sys
from pathlib import Path

from roll_opd.base.command_line import USER_ERROR
from roll_opd.base.hardware import has_gpu_driver
from roll_opd.base.paths import plain_path
from roll_opd.base.terminal import echo

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # vLLM's names
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}  # GiB; small, as a teacher does not generate
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", metavar="TEACHER", help="Hugging Face model directory, or a downloaded model's name")
    parser.add_argument("--name", help="name of the model on the server (default: the directory's name)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address on which to listen; 0.0.0.0: all addresses (set --api-key-env)"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="number of devices among which the model is split"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="maximum tokens of a sequence, plus 1")
    parser.add_argument("--topk", type=int, default=64, metavar="K", help="largest opd_topk of a run (-1: no limit)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key of the server")
    further = "further arguments for vllm serve, up to the end of the line"
    parser.add_argument("--vllm", nargs=argparse.REMAINDER, default=[], metavar="ARGUMENT", help=further)


def run(options: argparse.Namespace) -> int:
    """Run the server until it ends, and return its exit code. Return 2 for invalid input.

    A signal that ends the server is returned as 128 + its number, as in a shell.
    """
    # the argument parser must not need a package
    from roll_opd.base.hub import title_of
    from roll_opd.cluster.process_reaper import run_guarded
    from roll_opd.cluster.ray_environment import socket_parent
    from roll_opd.config.diagnostics import Diagnostics
    from roll_opd.models.layouts import check_tensor_parallel
    from roll_opd.models.model_files import engine_problem
    from roll_opd.models.model_info import ModelFilesError, read_model, whole_model
    from roll_opd.models.weight_files import weight_problems

    diagnostics = Diagnostics()
    try:
        info = read_model(whole_model(options.model, echo))
        directory = info.path
        diagnostics.problems.extend([*weight_problems(info), *filter(None, [engine_problem(directory)])])
        if options.tp < 1:
            diagnostics.error("--tp", f"{options.tp} is not a number of devices; give 1 or more")
        else:
            check_tensor_parallel(info, options.tp, "--tp", diagnostics, copies_kv_heads=True)
    except ModelFilesError as error:
        diagnostics.problems.append(str(error))
    if diagnostics.problems:
        echo("roll-opd: " + "\n  ".join(diagnostics.problems), sys.stderr)
        return USER_ERROR
    key = os.environ.get(options.api_key_env or "", "")
    if options.api_key_env and not key:
        echo(f"roll-opd: --api-key-env: the environment variable {options.api_key_env} is not set", sys.stderr)
        return USER_ERROR
    on_cpu = not has_gpu_driver()
    name = options.name or title_of(directory)
    echo(_section(options, name))
    sockets = {"VLLM_RPC_BASE_PATH": socket_parent()}
    environment = {
        **QUIET,
        **sockets,
        **(ON_CPU if on_cpu else {}),
        **os.environ,
        **({"VLLM_API_KEY": key} if key else {}),
    }
    command = server_command(options, directory, name, on_cpu)
    code = run_guarded(command, environment)
    return code if code >= 0 else 128 - code


def server_command(options: argparse.Namespace, model: Path, name: str, on_cpu: bool) -> list[str]:
    """Return the command that starts vLLM's server."""
    settings: dict[str, str | int] = {
        "served-model-name": name,
        "host": options.host,
        "port": options.port,
        "tensor-parallel-size": options.tp,
        "dtype": DTYPES[options.dtype],
        # one more, for the sequence's own token
        "max-logprobs": options.topk if options.topk < 0 else options.topk + 1,
        "generation-config": "vllm",
        **({"max-model-len": options.max_model_len} if options.max_model_len else {}),
    }
    written = [text for setting, value in settings.items() for text in (f"--{setting}", str(value))]
    switches = ["--enable-scale-out", *(["--enforce-eager"] if on_cpu else [])]
    # not `vllm serve`, which fails if the installed distribution is vllm-cpu
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", plain_path(str(model.resolve()))]
    return [*program, *written, *switches, *options.vllm]


def _section(options: argparse.Namespace, name: str) -> str:
    """Return the section `teacher` for the configuration of a run that uses this server."""
    lines = ["teacher:", "  http:", f"    url: http://{options.host}:{options.port}", f"    model_name: {name}"]
    if options.api_key_env:
        lines.append(f"    api_key_env: {options.api_key_env}")
    return "\n".join(["When the server answers, use it as the teacher of a run:", *lines])
