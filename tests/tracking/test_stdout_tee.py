"""The record of a run's output: as a terminal shows it, for any output of any process."""

import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from roll_opd.base.terminal import warn
from roll_opd.tracking.stdout_tee import CONSOLE_LOG, readable, tee_output


def log(directory: Path) -> list[str]:
    return (directory / CONSOLE_LOG).read_text(encoding="utf-8").splitlines()


def test_all_output_is_in_the_console_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with tee_output() as tee:
        print("before there is a directory")
        tee.write_to(tmp_path)
        print("half", end="")
        print("an error", file=sys.stderr)
        print(" a line")
        thread = threading.Thread(target=print, args=("\x1b[31mred\x1b[0m ü",))
        thread.start()
        thread.join()
        print("kept", end="")
    assert (sys.stdout, sys.stderr) == before
    print("after it")
    assert log(tmp_path) == ["before there is a directory", "an error", "half a line", "red ü", "kept"]
    out, err = capsys.readouterr()
    assert "half a line\n\x1b[31mred\x1b[0m ü\nkeptafter it\n" in out and err == "an error\n"


def test_a_second_log_has_the_same_lines_and_its_failure_is_a_warning(tmp_path: Path) -> None:
    places = tmp_path / "run", tmp_path / "logs"
    for place in places:
        place.mkdir()
    with tee_output() as tee:
        print("a")
        tee.write_to(*places)
        print("b")
        assert log(places[0]) == log(places[1]) == ["a", "b"] and not tee.warnings
        (places[1] / CONSOLE_LOG).unlink()
        places[1].rmdir()
        print("c\nd")
    assert log(places[0]) == ["a", "b", "c", "d"]
    assert len(tee.warnings) == 1 and str(places[1]) in tee.warnings[0]


def test_a_resumed_run_appends_to_the_log(tmp_path: Path) -> None:
    for part in ("first", "second"):
        with tee_output() as tee, tee_output() as inner:
            assert inner is tee
            tee.write_to(tmp_path)
            print(part)
    assert log(tmp_path) == ["first", "second"]


def test_warnings_are_collected_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = "max_steps: a sentence that is much longer than the terminal is wide (run.yaml:3)"
    with tee_output() as tee:
        warn(text)
        print("warning: no one's words, on standard output")
        print("warning: a library's", file=sys.stderr)
        print("an error", file=sys.stderr)
    assert tee.warnings == [text, "a library's"]
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 30


def test_the_replaced_stream_has_the_attributes_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    with tee_output():
        assert sys.stdout.encoding == "latin-1" and not sys.stdout.isatty()
        sys.stdout.writelines(["a\n", "b\n"])
        sys.stdout.flush()
        left = sys.stdout
    print("c", file=left)  # a logging handler may have kept it
    assert stream.buffer.getvalue() == b"a\nb\nc\n" or not stream.flush()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("plain\tü", "plain\tü"),
        ("\r 10%\r 20%\r100%", "100%"),
        ("done\r", "done"),
        ("\x1b[2K\x1b[1;32mgreen\x1b[0m\x1b]0;title\x07!\x07\x00", "green!"),
    ],
)
def test_control_characters_are_left_out(written: str, read: str) -> None:
    assert readable(written) == read


LIVE = """
import sys
from pathlib import Path
from roll_opd.tracking.stdout_tee import tee_output
with tee_output() as tee:
    tee.write_to(Path(sys.argv[1]))
    assert tee.is_live
    tee.show_live("generated 1 of 8 " + "x" * 200)
    tee.show_live("generated 2 of 8")
    print("step 1/2")
    tee.show_live("generated 3 of 8")
print("end")
"""


def test_a_live_line_is_erased_by_other_output(tmp_path: Path) -> None:
    """In a real terminal, 80 columns wide."""
    control, terminal = pty.openpty()
    child = subprocess.run(
        [sys.executable, "-c", LIVE, str(tmp_path)], stdout=terminal, env={**os.environ, "COLUMNS": "80"}, check=True
    )
    os.close(terminal)
    shown = os.read(control, 10000).decode()
    os.close(control)
    assert child.returncode == 0
    lines = [readable(line) for line in shown.replace("\r\n", "\n").removesuffix("\n").split("\n")]
    assert lines == ["step 1/2", "end"]
    assert all(len(part) < 80 for part in shown.split("\r\x1b[K")) and "generated 2 of 8\r\x1b[Kstep 1/2" in shown
    assert log(tmp_path) == ["step 1/2"]
