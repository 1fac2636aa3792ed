"""Options of an installed engine: read from its classes in a subprocess, and cached for the installed version.

The engine here is a small package; `test_config_roll.py` compares with vLLM and Megatron-core themselves.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge

from roll_opd.base.registry import type_problem
from roll_opd.models import engine_options
from roll_opd.models.engine_options import OptionClass, decoded, encoded

OPTIONS = """
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
with Path(__file__).with_name("imports.txt").open("a") as file:
    file.write("imported\\n")
time.sleep(0.3)
class Own: ...
@dataclass
class Options:
    size: int | None = None
    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    names: list[str] = field(default_factory=list)
    own: Own | None = None
    later: "Undefined" = None
"""
LIMITS = """
from pydantic import Field
from pydantic.dataclasses import dataclass
@dataclass
class Limits:
    size: int = Field(default=1, gt=0)
    share: float = Field(default=0.5, ge=0, le=1)
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with options, as the only engine; returns its directory."""
    package = tmp_path / "site" / "tinyengine"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "options": OPTIONS, "limits": LIMITS}.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        engine_options, "CLASSES", {"Tiny": OptionClass("tinyengine", "options", "Options", ("limits",))}
    )
    monkeypatch.setattr(engine_options, "_answers", {})
    return package


def read(*, in_a_new_process: bool = True) -> dict[str, Any] | None:
    if in_a_new_process:
        engine_options._answers.clear()
    return engine_options.engine_fields("Tiny")


def imports(package: Path) -> int:
    file = package / "imports.txt"
    return len(file.read_text(encoding="utf-8").split()) if file.exists() else 0


@pytest.mark.parametrize(
    "annotation",
    [
        *(int, float, bool, str, dict, list, Any, int | None, Literal["a", 1, True], list[str | int], dict[str, Any]),
        *(tuple[int, ...], tuple[int, str], dict[str, list[float] | None] | str, Literal["x"] | None),
    ],
)
def test_a_plain_type_survives_encoding_and_decoding(annotation: Any) -> None:
    assert decoded({"option": encoded(annotation)}) == {"option": annotation}


@pytest.mark.parametrize("annotation", [Path, Path | None, list[Path], "Undefined", Annotated[Path, Ge(1)]])
def test_a_type_of_the_engine_s_own_becomes_any(annotation: Any) -> None:
    assert decoded({"option": encoded(annotation)}) == {"option": Any}


def test_options_have_the_names_types_and_bounds_of_the_classes(tiny: Path) -> None:
    found = read()
    assert found and [*found] == ["size", "share", "kind", "names", "own", "later"]
    assert found["own"] is found["later"] is Any and found["kind"] == Literal["a", "b"]
    right = {"size": (1, None), "share": (0, 1.0), "kind": ("b",), "names": ([], ["x"]), "own": (5,)}
    wrong = {"size": (0, "1", 1.5), "share": (-0.1, 1.1, "x"), "kind": ("c",), "names": ("x", [1])}
    assert not [name for name, values in right.items() for value in values if type_problem(found[name], value)]
    assert all(type_problem(found[name], value) for name, values in wrong.items() for value in values)


def test_an_engine_is_imported_once_for_each_version(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = read()
    assert imports(tiny) == 1 and "tinyengine" not in sys.modules
    printed = capfd.readouterr().err
    assert printed.startswith("Reading the options of the installed Tiny (")
    assert str(tiny.parents[1] / "cache") in printed
    assert read() == first and imports(tiny) == 1 and not capfd.readouterr().err
    (tiny / "options.py").write_text(f"{OPTIONS}    added: int = 1\n", encoding="utf-8")
    assert read() == {**first, "added": int} and imports(tiny) == 2  # type: ignore[dict-item]


def test_the_set_up_reads_the_options_for_the_first_plan(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_options.cache_fields()
    sys.modules.pop("tinyengine")
    found = read()
    assert imports(tiny) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.parents[1] / "another"))
    assert read() == found and imports(tiny) == 2


def test_a_damaged_cache_file_is_replaced(tiny: Path) -> None:
    first = read()
    (file,) = (tiny.parents[1] / "cache" / "roll_opd").glob("*.json")
    for text in ("", "{", "[]"):
        file.write_text(text, encoding="utf-8")
        assert engine_options._cached(file) is None
    assert read() == first and imports(tiny) == 2 and engine_options._cached(file)


def test_without_a_writable_cache_a_process_asks_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tiny / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny / "file"))
    first = read()
    assert first and "is not writable, so each plan reads the options again" in capfd.readouterr().err
    assert read(in_a_new_process=False) == first and imports(tiny) == 1 and not capfd.readouterr().err


def test_an_engine_that_cannot_be_imported_is_reported_and_asked_again(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tiny / "options.py").write_text("import absent_library\n", encoding="utf-8")
    for _ in range(2):
        assert read() is None
        assert (
            "The options of Tiny are not checked: it cannot be imported (ModuleNotFoundError: No module named 'absent"
            in (capfd.readouterr().err)
        )
    assert read(in_a_new_process=False) is None and not capfd.readouterr().err


def test_two_processes_at_the_same_time_import_it_once(tiny: Path) -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from roll_opd.models import engine_options\n"
        f"engine_options.CLASSES = {{'Tiny': engine_options.OptionClass(*{tuple(engine_options.CLASSES['Tiny'])!r})}}\n"
        "print(sorted(engine_options.engine_fields('Tiny')))"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0] for process in both]
    assert answers[0] == answers[1] and "size" in answers[0]
    assert imports(tiny) == 1


def test_an_engine_that_is_not_installed_has_no_options(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in (OptionClass("no_such_engine", "a", "B"), OptionClass("tinyengine", "no_such_module", "B")):
        monkeypatch.setattr(engine_options, "CLASSES", {"Tiny": absent})
        assert read() is None
    assert imports(tiny) == 0
