"""`roll_opd.run`: train from a script or a notebook, and get the run's summary.

The run is a process of its own, the one that `roll-opd run` is, with its output shown as it comes. Two other ways were
weighed. In this process: a run patches torch for Megatron, changes the environment, starts Ray and an event loop of
its own, so a notebook could not run a second one, nor use Ray or a loop itself; and what kills a run would kill the
notebook with all its variables. `multiprocessing`: it imports the caller's main module again, so a script runs twice.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from roll_opd.base.command_line import RUN_DIRECTORY_FILE

SAID = "roll-opd: "  # how the sentence begins that says what has ended a run
TAIL = 8000  # characters of output that are searched for it
LAST_LINES = 15  # shown of a run that ended without such a sentence
POLL_MS = 500

Config = str | os.PathLike[str] | Mapping[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]


class RunFailed(RuntimeError):
    """A run did not get to its end; the message is the sentence that the command line shows.

    `exit_code` is that of `roll-opd run`, negative for the signal that ended it; `run_directory` holds what was logged
    until then, and is None where nothing was started.
    """

    def __init__(self, message: str, exit_code: int, run_directory: Path | None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.run_directory = run_directory


def run(config: Config, overrides: Overrides = (), *, pipeline: str | None = None) -> dict[str, Any]:
    """Train to the end and return `summary.json`, with `run_directory` and `model` added.

    `config` is the path of a YAML file, or its content as a mapping (`defaults` included). `overrides` are written as
    on the command line (`["max_steps=20"]`), or as a mapping of dotted keys to values. `pipeline`: distill, rlvr,
    agentic, sft, dpo or the dotted path of a module; without it the configuration tells. Relative paths lead from the
    current directory, then from the file. `model` is the directory of the newest checkpoint's model in Hugging Face's
    form, None where none was written.

    Blocks until the run has ended, also where an event loop is running. An interrupt (Ctrl-C, the notebook's stop
    button) ends the run as in a terminal. Raises RunFailed.
    """
    with tempfile.TemporaryDirectory(prefix="roll_opd-") as scratch:
        told = Path(scratch, "run_directory")
        # -P: not the current directory before all others, but what `_search_path` says
        command = [sys.executable, "-P", "-m", "roll_opd", "run", *([pipeline] if pipeline else [])]
        command += [*_configuration(config, Path(scratch)), *_overrides(overrides)]
        environment = os.environ | {RUN_DIRECTORY_FILE: str(told), "PYTHONPATH": os.pathsep.join(_search_path())}
        code, output = _run_and_show(command, environment)
        directory = Path(told.read_text(encoding="utf-8")) if told.exists() else None
    if code or directory is None:
        raise RunFailed(_sentence(code, output), code, directory)
    from roll_opd.pipelines.checkpoints import complete

    file = directory / "summary.json"
    summary = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    newest = [str(checkpoint / "hf") for checkpoint in complete(directory)[:1]]
    return {**summary, "run_directory": str(directory), "model": newest[0] if newest else None}


def _configuration(config: Config, scratch: Path) -> list[str]:
    """Return the words that name `config`; a mapping is written into the directory `scratch`."""
    if isinstance(config, Mapping):
        import yaml

        path = scratch / "run.yaml"
        try:
            path.write_text(yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
        except yaml.representer.RepresenterError as error:
            what = f"config: {error.args[-1]!r} has no form in YAML; give numbers, texts, lists and mappings"
            raise TypeError(what) from None
    else:
        path = Path(config).expanduser()
    return ["--config_path", str(path.parent), "--config_name", path.name]


def _overrides(overrides: Overrides) -> Iterator[str]:
    """Yield an override as on the command line for each of `overrides`."""
    if isinstance(overrides, str):
        raise TypeError(f"overrides: {overrides!r} is a text; give a list of them, or a mapping of keys to values")
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            if isinstance(value, Mapping) and value:
                yield from _overrides({f"{key}.{name}": inner for name, inner in value.items()})
            else:
                yield f"{key}={_in_hydras_words(_plain(value))}"
    else:
        yield from overrides


def _in_hydras_words(value: Any) -> str:
    """Return a plain value as Hydra reads it on a command line."""
    if isinstance(value, str):
        from hydra.core.override_parser.types import Quote, QuotedString

        return QuotedString(value, Quote.double).with_quotes()
    if isinstance(value, list):
        return f"[{','.join(map(_in_hydras_words, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_in_hydras_words(item)}' for key, item in value.items())}}}"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    """Return mappings, sequences and paths as YAML knows them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _search_path() -> list[str]:
    """Return where this process finds modules that are not installed: a run finds the user's rewards there, too."""
    packages = site.getsitepackages([sys.prefix, sys.base_prefix])
    installed = [*packages, site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "platstdlib"))]
    places = [Path(entry).absolute() for entry in sys.path if not entry.endswith(".zip")]
    return [str(place) for place in places if not any(place.is_relative_to(path) for path in installed)]


def _run_and_show(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command, show what it prints, and return its exit code and the end of what it printed."""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # an interrupt reaches it from here, and so once, whoever else gets it
    ) as process:
        try:
            output = _show(process)
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                _show(process)  # it puts everything away, and says so
            except BaseException:  # interrupted once more: at once, then
                process.kill()
                raise
            raise
        return process.wait(), output


def _show(process: subprocess.Popen[bytes]) -> str:
    """Print what a process prints until it has ended, and return the end of that."""
    assert process.stdout is not None
    output, tail = process.stdout.fileno(), ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    poll = select.poll()
    poll.register(output, select.POLLIN)
    while True:
        ended = process.poll() is not None  # asked first: what it has printed by then is in the pipe
        if poll.poll(0 if ended else POLL_MS):
            chunk = os.read(output, 1 << 16)
            if not chunk:
                return tail
            text = decoder.decode(chunk)
            sys.stdout.write(text)
            sys.stdout.flush()
            tail = (tail + text)[-TAIL:]
        elif ended:  # something that it has started may hold the pipe open
            return tail


def _sentence(code: int, output: str) -> str:
    """Return what the output says of the end of a run."""
    _, found, said = f"\n{output}".rpartition(f"\n{SAID}")
    if found:
        return said.strip()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return "\n".join([f"the run {how}; its last lines:", *output.splitlines()[-LAST_LINES:]])
