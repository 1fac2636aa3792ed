"""docs/environments.md: its file is an environment, its configurations are valid, and it has all names."""

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_opd.extras.games import ENVIRONMENTS, check, find, make
from roll_opd.extras.games import serve as serve_module
from roll_opd.extras.games.factory import NEEDS
from tests.pages import DOCS, blocks

PAGE = (DOCS / "environments.md").read_text(encoding="utf-8")


def test_the_file_of_ones_own_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("environments.md", "python")
    assert len(code.splitlines()) <= 40
    (tmp_path / "my_envs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert check("my_envs.Echo", {"words": 2}) == []
    assert "known are words, tries" in check("my_envs.Echo", {"colour": 2})[0]
    env = make("my_envs.Echo", words=2)
    text, _ = env.reset(seed=1)
    assert env.reset(seed=1)[0] == text
    assert env.step("?")[1:4] == (0.0, False, False)
    assert env.step(f"<answer>{text.partition(': ')[2]}</answer>")[1:4] == (1.0, True, False)
    env.reset(seed=2)
    assert [env.step("?")[3] for _ in range(2)] == [False, True]


def test_the_configurations_can_be_made() -> None:
    for text in blocks("environments.md", "yaml"):
        for env in yaml.safe_load(text)["custom_envs"].values():
            assert check(env["env_type"], env["env_config"]) == []


def test_the_command_of_the_page_starts_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Server:
        url, server_address = "http://127.0.0.1:8000", ("127.0.0.1", 8000)

        def __init__(self, *arguments: Any) -> None:
            started.append(arguments)

        def serve_forever(self) -> None: ...

        def server_close(self) -> None: ...

    monkeypatch.setattr(serve_module, "EnvironmentServer", Server)
    (line,) = blocks("environments.md", "sh")
    assert serve_module.main(shlex.split(line)[3:]) == 0
    assert started == [("frozen_lake", {"size": 6, "is_slippery": False}, "127.0.0.1", 8000, 1024)]


def test_no_name_and_no_argument_is_left_out() -> None:
    said = set(re.findall(r"`([\w:.]+)`", PAGE))
    assert {*ENVIRONMENTS.builtin, *NEEDS} <= said
    for name in ENVIRONMENTS.builtin:
        parameters = inspect.signature(find(name)).parameters.values()
        names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        assert names <= said, name
