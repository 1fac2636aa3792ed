"""`roll_opd.run`: train from a script or a notebook, and return the run's summary.

The run is a separate process, as with `roll-opd run`. Its output is printed as it arrives. A run cannot share the
caller's process, because a run patches torch for Megatron, changes the environment, and starts Ray and an event loop. A
notebook could then train only once, and could not use Ray or an event loop for other work. The notebook would also be
killed together with the run.

`multiprocessing` is not used, because it would import the caller's main module again, and so execute a script twice.
"""

import codecs
import json
import os
import select
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from roll_opd.base.command_line import RUN_DIRECTORY_FILE

PREFIX = "roll-opd: "  # prefix of the message about the end of a run
TAIL = 8000  # number of characters at the end of the output that are searched for this message
LAST_LINES = 15  # number of last lines shown if a run ended without such a message
POLL_MS = 500

Config = str | os.PathLike[str] | Mapping[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]


class RunFailed(RuntimeError):
    """A run has failed. The message is the error that the command line prints.

    Attributes:
        exit_code: exit code of `roll-opd run`, or -n if signal n ended the run.
        run_directory: directory with the logs up to the failure. None if nothing was started.
    """

    def __init__(self, message: str, exit_code: int, run_directory: Path | None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.run_directory = run_directory


def run(
    config: Config,
    overrides: Overrides = (),
    *,
    pipeline: str | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    """Run a configuration to its end, and return the run's summary.

    The result is the content of `summary.json` with two more keys. `run_directory` is the run's directory. `model` is
    the model directory of the newest checkpoint, in Hugging Face's format, or None if there is no checkpoint.

    The call blocks until the run has ended, even inside a running event loop. An interrupt (Ctrl-C, or the notebook's
    stop button) ends the run as in a terminal. Raises RunFailed.

    Args:
        config: the path of a YAML file, or the content of such a file as a mapping, which may include `defaults`.
        overrides: a list as on the command line, for example `["max_steps=20"]`, or a mapping of dotted keys to values.
        pipeline: distill, rlvr, agentic, sft, dpo, offline_distill, or the dotted path of a module. None: the
            configuration decides.
        rewards: a map from each domain to its reward function. The function may be defined in the script or notebook;
            see `reward_overrides`.

    Relative paths are looked up in the current directory, and then in the directory of the YAML file.
    """
    with tempfile.TemporaryDirectory(prefix="roll_opd-") as scratch:
        announced = Path(scratch, "run_directory")
        command = run_command(pipeline, config, overrides, rewards or {}, Path(scratch))
        code, output = _run_and_show(command, run_environment(announced))
        directory = Path(announced.read_text(encoding="utf-8")) if announced.exists() else None
    if code or directory is None:
        raise RunFailed(end_message(code, output), code, directory)
    from roll_opd.tracking.run_directory import complete_checkpoints

    file = directory / "summary.json"
    summary = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    newest = [str(checkpoint / "hf") for checkpoint in complete_checkpoints(directory)[:1]]
    return {**summary, "run_directory": str(directory), "model": newest[0] if newest else None}


def run_command(
    pipeline: str | None,
    config: Config,
    overrides: Overrides,
    rewards: Mapping[str, Callable[..., Any]],
    scratch: Path,
) -> list[str]:
    """Return the command that starts a run. The files that the run reads are written into the directory `scratch`."""
    # -P: do not prepend the current directory; `_search_path` has all directories
    command = [sys.executable, "-P", "-m", "roll_opd", "run", *([pipeline] if pipeline else [])]
    return [*command, *_configuration(config, scratch), *reward_overrides(rewards, scratch), *_overrides(overrides)]


def run_environment(announced: Path) -> dict[str, str]:
    """Return the environment variables of a run.

    The run writes the path of its run directory to the file `announced`, and ends if this process ends.
    """
    return os.environ | {RUN_DIRECTORY_FILE: str(announced), "PYTHONPATH": os.pathsep.join(_search_path())}


REWARD_MODULE = """\
from pathlib import Path

from ray import cloudpickle

globals().update(cloudpickle.loads(Path(__file__).with_suffix(".pickle").read_bytes()))
"""


def reward_overrides(rewards: Mapping[str, Callable[..., Any]], scratch: Path) -> list[str]:
    """Write reward functions to `scratch`, and return the overrides that set them as the rewards of their domains.

    A function is pickled by value, so it may be defined in a script or in a notebook cell. Raises TypeError for a
    function that cannot be pickled.
    """
    if not rewards:
        return []
    from ray import cloudpickle

    sent: dict[str, Callable[..., Any]] = {}
    for domain, reward in rewards.items():
        if not callable(reward):
            raise TypeError(f"rewards: {domain} is {reward!r}; give a function score(samples) that returns numbers")
        try:
            cloudpickle.dumps(reward)
        except Exception as error:
            raise TypeError(
                f"rewards: {domain} refers to an object that cannot be sent to another process ({error}); create the"
                " object inside the function, or put the function into a module"
            ) from error
        sent[f"reward_{len(sent)}"] = reward
    file = scratch / "script_rewards.py"
    file.write_text(REWARD_MODULE, encoding="utf-8")
    file.with_suffix(".pickle").write_bytes(cloudpickle.dumps(sent))
    workers = {domain: f"{file}:{name}" for name, domain in zip(sent, rewards, strict=True)}
    return [f"++rewards.{domain}.worker_cls={_hydra_literal(worker)}" for domain, worker in workers.items()]


def _configuration(config: Config, scratch: Path) -> list[str]:
    """Return the command-line arguments that select `config`. A mapping is first written to a file."""
    if isinstance(config, Mapping):
        import yaml

        path = scratch / "run.yaml"
        try:
            path.write_text(yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
        except yaml.representer.RepresenterError as error:
            what = f"config: {error.args[-1]!r} cannot be written as YAML; give numbers, texts, lists and mappings"
            raise TypeError(what) from None
    else:
        path = Path(config).expanduser()
    return ["--config_path", str(path.parent), "--config_name", path.name]


def _overrides(overrides: Overrides) -> Iterator[str]:
    """Yield the overrides in the syntax of the command line."""
    if isinstance(overrides, str):
        raise TypeError(f"overrides: {overrides!r} is a text; give a list of overrides, or a mapping of keys to values")
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            if isinstance(value, Mapping) and value:
                yield from _overrides({f"{key}.{name}": inner for name, inner in value.items()})
            else:
                yield f"{key}={_hydra_literal(_plain(value))}"
    else:
        yield from overrides


def _hydra_literal(value: Any) -> str:
    """Return a plain value as a literal in Hydra's override grammar."""
    if isinstance(value, str):
        from hydra.core.override_parser.types import Quote, QuotedString

        return QuotedString(value, Quote.double).with_quotes()
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_hydra_literal(item)}' for key, item in value.items())}}}"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    """Return a value in which mappings, sequences and paths are converted to types that YAML can write."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _search_path() -> list[str]:
    """Return the directories of `sys.path`, except the directories of installed packages.

    The run needs these directories to import the user's rewards.
    """
    packages = site.getsitepackages([sys.prefix, sys.base_prefix])
    installed = [*packages, site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "platstdlib"))]
    places = [Path(entry).absolute() for entry in sys.path if not entry.endswith(".zip")]
    return [str(place) for place in places if not any(place.is_relative_to(path) for path in installed)]


def _run_and_show(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command and print its output. Return (exit code, end of the output)."""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a separate process group: this process forwards an interrupt, once
    ) as process:
        try:
            output = show(process)
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                show(process)  # shows the run's clean-up and last message
            except BaseException:  # a second interrupt: kill it immediately
                process.kill()
                raise
            raise
        return process.wait(), output


def show(process: subprocess.Popen[bytes]) -> str:
    """Print the output of a process until the process ends. Return the end of the output."""
    assert process.stdout is not None
    output, tail = process.stdout.fileno(), ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    poll = select.poll()
    poll.register(output, select.POLLIN)
    while True:
        # read before `poll`: if the process has ended, all of its output is in the pipe
        ended = process.poll() is not None
        if poll.poll(0 if ended else POLL_MS):
            chunk = os.read(output, 1 << 16)
            if not chunk:
                return tail
            text = decoder.decode(chunk)
            sys.stdout.write(text)
            sys.stdout.flush()
            tail = (tail + text)[-TAIL:]
        elif ended:  # a process that the run started may keep the pipe open
            return tail


def end_message(code: int, output: str) -> str:
    """Return the error message of a run that has failed, taken from its output."""
    _, found, message = f"\n{output}".rpartition(f"\n{PREFIX}")
    if found:
        return message.strip()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return "\n".join([f"the run {how}; the last lines of its output:", *output.splitlines()[-LAST_LINES:]])
