"""`roll_opd.run`: its arguments, and its result after each kind of end. tests/pipelines/test_runs.py trains with it."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import roll_opd
from roll_opd.commands import python_api
from tests.each import each


@each(
    "value",
    [
        *(1, -2, 2.5, 1e-05, True, False, None, "", "a", "1", "true", "null", "a b", "a,b=c", "x: y", "[1]", "{a}"),
        *('say "a"', "it's", "a\\", 'a\\"', "${max_steps}", "list(range(0,8))", "ÄÖ 漢", " a "),
        *([], [1, "b", None], ["a,b", [True]], [{"a": 1, "b": ["c d"]}], {}),
    ],
)
def test_a_value_reaches_hydra_as_it_is(value: Any) -> None:
    [text] = python_api._overrides({"some.key": value})
    override = OverridesParser.create().parse_override(text)
    assert (override.key_or_group, override.value()) == ("some.key", value)


def test_overrides_of_nested_settings_are_dotted_keys() -> None:
    nested = {"a": {"b": 1, "c": {"d": Path("/x y")}}, "e": (1, 2)}
    assert list(python_api._overrides(nested)) == ["a.b=1", 'a.c.d="/x y"', "e=[1,2]"]
    assert list(python_api._overrides(["a=1", "~b"])) == ["a=1", "~b"]
    with pytest.raises(TypeError, match="give a list"):
        list(python_api._overrides("a=1"))


def test_a_value_without_a_form_in_yaml(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"<object .* cannot be written as YAML; give"):
        roll_opd.run({"exp_name": object()})


def test_modules_are_found_where_the_caller_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    places = python_api._search_path()
    assert places[0] == str(tmp_path)
    assert not [place for place in places if place.endswith(("site-packages", "lib-dynload"))]


@pytest.mark.parametrize(
    ("code", "output", "sentence"),
    [
        (2, "a warning\nroll-opd: first\nroll-opd: the configuration has a problem:\n  1. x\n", "the configuration"),
        (1, "roll-opd: values are not finite\n", "values are not finite"),
        (-9, "step 1\nstep 2", "the run was ended by SIGKILL; the last lines of its output:\nstep 1\nstep 2"),
        (
            1,
            "".join(f"line {number}\n" for number in range(99)),
            "ended with exit code 1; the last lines of its output:\nline 84\n",
        ),
    ],
)
def test_the_sentence_of_an_end(code: int, output: str, sentence: str) -> None:
    assert sentence in python_api.end_message(code, output)
    assert "first" not in python_api.end_message(code, output)


@pytest.mark.slow
def test_a_refusal_is_raised_inside_a_running_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def cell() -> None:
        roll_opd.run({"exp_name": "x", "max_stepz": 1}, pipeline="sft")

    with pytest.raises(roll_opd.RunFailed, match=r"max_stepz: unknown key.*\(run.yaml:2\)") as raised:
        asyncio.run(cell())
    assert (raised.value.exit_code, raised.value.run_directory) == (2, None)
    assert "Traceback" not in str(raised.value) and "max_stepz" in capsys.readouterr().out


PUTS_AWAY = "import time\nprint('ready', flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('put away')"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Enable Ctrl-C as in a terminal, also if a shell started the tests in the background and thereby disabled it."""
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, outer)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_run_as_in_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    import _thread

    before = psutil.Process().children()
    threading.Timer(0.5, _thread.interrupt_main).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        python_api._run_and_show([sys.executable, "-c", PUTS_AWAY], {})
    assert capfd.readouterr().out == "ready\nput away\n"
    assert time.monotonic() - started < 20 and psutil.Process().children() == before


def test_what_a_run_has_started_does_not_hold_up_its_end() -> None:
    """A process may keep the output open after the end of the run."""
    program = "import subprocess\nprint(subprocess.Popen(['sleep', '30']).pid)"
    started = time.monotonic()
    code, output = python_api._run_and_show([sys.executable, "-c", program], {"PATH": "/usr/bin:/bin"})
    assert code == 0 and time.monotonic() - started < 10
    psutil.Process(int(output)).kill()
