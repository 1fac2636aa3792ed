"""The `roll-opd` command: its subcommands, and those of other packages.

`roll-opd doctor` must run even if no package is installed. Therefore this module imports only the standard library, and
a subcommand is imported when it runs.

Exit codes: 0 done; 2 invalid input (message on stderr, nothing started); 130 interrupted; 1 any other failure.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from roll_opd import __version__
from roll_opd.base.addresses import exempt_loopback
from roll_opd.base.command_line import (
    FAILED,
    INTERRUPTED,
    SIZES,
    USER_ERROR,
    add_config_arguments,
    configuration,
    pipeline_arguments,
    safe_output,
    use_utf8,
    without_collections,
)
from roll_opd.base.entry_points import entries, load
from roll_opd.base.failures import ConfigError, os_sentence, print_unexpected
from roll_opd.base.installed import refuse_shadowing_files
from roll_opd.base.interpreter import NO_TORCH, REMEDY, lacking, use_project_environment
from roll_opd.base.paths import report_temp_directory
from roll_opd.commands import init_project, serve_teacher

if TYPE_CHECKING:
    from roll_opd.config.plan import RunPlan


@dataclass(frozen=True)
class Command:
    """A subcommand: its help text, its arguments, and a function that runs it and returns the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    needs_engines: bool = True  # files in the current directory may then not shadow the engines' packages
    needs_extra: bool = False  # the packages of the extra cpu or gpu must be installed


class Advice(Protocol):
    """What `roll-opd plan` prints below a plan, or adds to its JSON under the name of the entry point."""

    def to_json(self) -> dict[str, Any]:
        """Return the advice as JSON types."""

    def to_text(self, width: int) -> str:
        """Return the advice as text, at most `width` columns wide."""


@dataclass(frozen=True)
class PlanAdvice:
    """Advice on a plan: the options of `roll-opd plan` that ask for it, and a function that gives it.

    A package names it as an entry point of the group `roll_opd.plan_advice`. The function returns None if no option
    asks for advice, and raises ConfigError for a wrong option.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    advise: Callable[["RunPlan", argparse.Namespace], Advice | None]


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    fetch = "download what the plan reads of names on the hub: config.json, tokenizers and data sets, but no weights"
    parser.add_argument("--fetch", action="store_true", help=fetch)
    with suppress(ImportError):  # `_plan` reports it; other commands need no advice
        for advice in _plan_advice().values():
            advice.add_arguments(parser)


def _plan_advice() -> dict[str, PlanAdvice]:
    """Return the advice of other packages by name; raise ImportError if a package cannot be imported."""
    return {name: load(entry) for name, entry in entries("plan_advice").items()}


def _plan(arguments: argparse.Namespace) -> int:
    from roll_opd.base import hub
    from roll_opd.base.terminal import columns, echo
    from roll_opd.commands.describe import to_json
    from roll_opd.commands.plan_text import to_text
    from roll_opd.models.hub_models import with_sizes
    from roll_opd.pipelines.check_machine import warnings_here
    from roll_opd.pipelines.user_code import uses_user_code
    from roll_opd.planner.load_plan import load_plan

    try:
        chosen = pipeline_arguments(arguments)
        say = (lambda text: None) if arguments.json else echo
        with hub.downloading(partial(echo, stream=sys.stderr)) if arguments.fetch else nullcontext():
            plan = load_plan(*configuration(arguments), **chosen, runnable=False, say=say)
            plan = with_sizes(plan) if arguments.fetch else plan
        plan = replace(plan, warnings=(*plan.warnings, *warnings_here(plan)))
        found = {name: advice.advise(plan, arguments) for name, advice in _plan_advice().items()}
    except (ConfigError, ImportError) as error:
        echo(f"roll-opd: {error}", sys.stderr)
        return USER_ERROR
    if uses_user_code(plan) or (plan.workflow and plan.rewards):
        # imports torch; modules of the user may import torch too
        from roll_opd.commands.exit_codes import exit_code
        from roll_opd.pipelines.check_user_code import check_user_code

        try:
            with redirect_stdout(sys.stderr):  # what imported modules print is not part of a plan
                check_user_code(plan)
        except Exception as error:
            return exit_code(error, is_started=False)
    plan = replace(plan, warnings=tuple(text for text in plan.warnings if text not in plan.refusals))
    given = {name: advice for name, advice in found.items() if advice}
    if arguments.json:
        print(json.dumps(to_json(plan) | {name: one.to_json() for name, one in given.items()}, indent=2), flush=True)
    else:
        print("\n\n".join([to_text(plan, columns()), *(one.to_text(columns()) for one in given.values())]), flush=True)
    if plan.refusals:
        echo(f"roll-opd: {ConfigError(list(plan.refusals))}", sys.stderr)
        return USER_ERROR
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from roll_opd.commands.run import launch

    return launch(arguments, **pipeline_arguments(arguments))


def _score_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face model directory")
    of_rows = 'lines {"id", "tokens", "prompt_length"}; or rows with answers to tokenise, as for SFT'
    parser.add_argument("--input", required=True, metavar="ROWS.jsonl", help=of_rows)
    of_scores = 'OUT.jsonl: lines {"id", "logprobs"}; OUT.parquet: a teacher file; in the order of the input'
    parser.add_argument("--output", required=True, metavar="OUT", help=of_scores)
    parser.add_argument("--topk", type=int, metavar="K", help="also write the K most likely tokens (parquet)")
    parser.add_argument(
        "--name", metavar="NAME", help="teacher's name in the file (default: the model directory's name)"
    )
    of_vocabulary = "number of token ids over which log-probs are normalised (default: all ids of the model)"
    parser.add_argument("--vocab-size", type=int, metavar="N", help=of_vocabulary)
    for name, what in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{what}-parallel size")
    of_experts = "expert-parallel size, within the ranks of tp, cp and dp"
    parser.add_argument("--ep", type=int, default=1, metavar="N", help=of_experts)
    parser.add_argument("--expert-tp", type=int, metavar="N", help="expert-tensor-parallel size (default: --tp)")
    parser.add_argument("--vpp", type=int, default=1, metavar="N", help="virtual pipeline stages per rank")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=8192, metavar="N")
    of_hosts = "seconds that host 0 waits for the other hosts"
    parser.add_argument("--host-timeout-s", type=float, default=600.0, metavar="S", help=of_hosts)


def _score(arguments: argparse.Namespace) -> int:
    from roll_opd.commands.score import run

    return run(arguments)


def _check_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="Hugging Face model directory")
    parser.add_argument("--tokens", type=int, metavar="N", help="maximum tokens of a sequence")
    parser.add_argument("--no-vllm", action="store_true", help="leave out vLLM")


def _check_model(arguments: argparse.Namespace) -> int:
    from roll_opd.commands.check_model import run

    return run(arguments)


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run, finished or not")
    parser.add_argument("--data", action="store_true", help="also compare the ids of the prompts with the data files")


def _audit(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from roll_opd.commands.run_audit import run

    return run(Path(arguments.run), with_data=arguments.data)


def _doctor(arguments: argparse.Namespace) -> int:
    from roll_opd.commands.doctor import main as inspect_and_report

    return inspect_and_report()


COMMANDS: dict[str, Command] = {
    "init": Command(
        "write a project from an example: configuration, reward, launcher, rows, two small models",
        init_project.add_arguments,
        init_project.run,
        needs_engines=False,
    ),
    "plan": Command("resolve, check and show a configuration without starting a run", _plan_arguments, _plan),
    "run": Command(
        "train: plan and check a configuration, and run it to its end", add_config_arguments, _run, needs_extra=True
    ),
    "score": Command(
        "token log-probs of a JSONL file with the Megatron engine", _score_arguments, _score, needs_extra=True
    ),
    "serve": Command(
        "serve a teacher's log-probs over HTTP with vLLM",
        serve_teacher.add_arguments,
        serve_teacher.run,
        needs_extra=True,
    ),
    "check-model": Command(
        "compare a local model's log-probs and export with Hugging Face and vLLM", _check_model_arguments, _check_model
    ),
    "audit": Command("compare the files of a run with each other", _audit_arguments, _audit, needs_engines=False),
    "doctor": Command(
        "report installed packages, devices and problems of this machine",
        lambda parser: None,
        _doctor,
        needs_engines=False,
    ),
}


def commands() -> dict[str, Command]:
    """Return all commands by name: the core's, and those of the entry points in the group `roll_opd.commands`.

    A command that cannot be imported only reports this, so that a broken package does not stop the others.
    """
    found = dict(COMMANDS)
    for name, entry in entries("commands").items():
        if name in COMMANDS:
            raise ConfigError([f"entry point {entry.group}: {name} = {entry.value}: roll-opd has a command {name}"])
        try:
            found[name] = load(entry)
        except ImportError as error:
            found[name] = _broken(str(error))
    return found


def _broken(why: str) -> Command:
    def run(arguments: argparse.Namespace) -> int:
        print(f"roll-opd: {why}", file=sys.stderr)
        return USER_ERROR

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # its options are not known, so they are read as further words
        parser.add_argument("words", nargs="*")

    return Command("cannot be imported", add_arguments, run, needs_engines=False)


def build_parser(known: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Return the parser of `roll-opd`. It has a subparser for each command."""
    parser = argparse.ArgumentParser(prog="roll-opd", description="On-policy distillation of language models.")
    parser.add_argument("--version", action="version", version=f"roll-opd {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in known.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(subparser)
    return parser


def parse(arguments: Sequence[str] | None, known: Mapping[str, Command] = COMMANDS) -> argparse.Namespace:
    """Parse the command line. Overrides may come before, between or after the options."""
    parser = build_parser(known)
    parsed, rest = parser.parse_known_args(arguments)
    is_override = all(not text.startswith("-") for text in rest)
    if rest and not (is_override and "overrides" in parsed):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code. Exits with code 2 if the command line is wrong."""
    if arguments is None:
        use_utf8()
    safe_output()
    exempt_loopback()
    try:
        known = commands()
    except ConfigError as error:
        print(f"roll-opd: {error}", file=sys.stderr)
        return USER_ERROR
    parsed = parse(arguments, known)
    command = known[parsed.command]
    if command.needs_extra:
        use_project_environment()
    if command.needs_engines:
        refuse_shadowing_files()
        report_temp_directory()
    try:
        with without_collections():
            return command.run(parsed)
    except KeyboardInterrupt:
        print("roll-opd: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader (head, less) has closed the pipe; this suppresses Python's error message at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"roll-opd: {os_sentence(error)}", file=sys.stderr)
        return USER_ERROR
    except Exception as error:  # users get a sentence instead of a traceback
        is_missing = isinstance(error, ModuleNotFoundError)
        lack = is_missing and (lacking(NO_TORCH) or lacking(needs_packages=True))
        if lack:
            print(f"roll-opd: {sys.executable} {lack}; {REMEDY}", file=sys.stderr)
        else:
            print_unexpected(error)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
