"""docs/verifiers.md, docs/openenv.md and docs/nemo-gym.md: their examples, run with the packages that they describe.

Tests that need a package are skipped if it is not installed.
"""

import asyncio
import importlib
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from roll_opd.extras.games import check, make
from roll_opd.workflows.builtin.agent import AgentWorkflow
from roll_opd.workflows.workflow_interface import Task
from tests.pages import BLOCK, DOCS, blocks
from tests.workflows.test_workflow_endpoint import MODEL, Served, served

VERIFIERS = "needs verifiers (pip install verifiers)"
EXAMPLES = DOCS.parent / "examples"
OPENENV = "needs OpenEnv (pip install openenv-core)"


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory on sys.path; its modules are unloaded afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def sums(plugins: Path) -> Any:
    """Return the page's agent, in the directory of its environment."""
    pytest.importorskip("verifiers.v1", reason=VERIFIERS)
    for name in ("sums_env.py", "sums_agent.py"):
        shutil.copy(EXAMPLES / "verifiers" / name, plugins)
    return importlib.import_module("sums_agent")


def test_rollouts_of_verifiers_are_what_was_sampled(tokenizer: Any, sums: Any) -> None:
    """Three concurrent rollouts in separate sessions; the reward is the weighted sum of two rewards."""
    (arguments,) = (yaml.safe_load(text)["workflow_args"] for text in blocks("verifiers.md", "yaml"))
    _, tasks = sums.environment()
    right = tasks[5].data.answer
    others = {f"{right}<|end|>": 1.0, f"1{right}<|end|>": 0.25, "x<|end|>": 0.0}

    async def one(served: Served, number: int) -> tuple[str, float]:
        served.run(number)
        workflow = AgentWorkflow(model=served.model, task=Task(raw_task={"task": 5}, workflow_args=arguments))
        (made,) = await workflow.run_async()
        assert tasks[5].data.prompt in tokenizer.decode(made.tokens[: made.prompt_length])
        assert bool(made.action_mask.all())
        return tokenizer.decode(made.tokens[made.prompt_length :]), made.reward

    async def script(served: Served) -> None:
        found = await asyncio.gather(*[asyncio.create_task(one(served, number)) for number in range(3)])
        assert dict(found) == others and served.endpoint.counts == {"200": 3}

    served(script, tokenizer, *others)


def test_a_rollout_of_verifiers_that_fails_fails_the_run(
    tokenizer: Any, sums: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(served: Served) -> None:
        served.run()
        with pytest.raises(RuntimeError, match="401"):
            await sums.solve({"task": 0}, served.model.base_url, "wrong")
        assert not served.engine.asked

    served(script, tokenizer)


@pytest.fixture
def walk(plugins: Path) -> Iterator[str]:
    """The URL of the server of the page, which runs in a thread; its environment can be imported."""
    pytest.importorskip("openenv.core", reason=OPENENV)
    import uvicorn

    for name in ("walk_server.py", "openenv_game.py"):
        shutil.copy(EXAMPLES / "openenv" / name, plugins)
    listening = socket.create_server(("127.0.0.1", 0))
    app = importlib.import_module("walk_server").app
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def test_a_game_of_openenv_plays(walk: str) -> None:
    """Two concurrent games are independent, a seed gives the same game, and a finished game is reset."""
    (page,) = (yaml.safe_load(text)["custom_envs"]["Walk"] for text in blocks("openenv.md", "yaml"))
    config = {**page["env_config"], "url": walk}
    assert check(page["env_type"], config) == [] and "known are url" in check(page["env_type"], {"uri": walk})[0]
    one, other = make(page["env_type"], **config), make(page["env_type"], **config)
    first, info = one.reset(seed=1)
    assert other.reset(seed=2)[0] != first and one.reset(seed=1) == (first, info) and info == {}
    (row, column), (goal_row, goal_column) = (divmod(first.replace("\n", "").index(sign), 4) for sign in "PG")
    way = ["Down" if goal_row > row else "Up"] * abs(goal_row - row)
    way += ["Right" if goal_column > column else "Left"] * abs(goal_column - column)
    for _ in range(2):
        assert one.step("nowhere") == (first, 0.0, False, False, {})
        *before, (_, *last) = [one.step(action) for action in way]
        assert all(step[1:] == (0.0, False, False, {}) for step in before) and last == [1.0, True, False, {}]
        assert one.reset(seed=1)[0] == first
    one.close()
    other.close()


def test_a_server_of_openenv_that_is_not_there_is_reported(plugins: Path) -> None:
    pytest.importorskip("openenv.core", reason=OPENENV)
    shutil.copy(EXAMPLES / "openenv" / "openenv_game.py", plugins)
    game = make("openenv_game.Game", url="http://127.0.0.1:1")
    with pytest.raises(ConnectionError, match="Failed to connect"):
        game.reset(seed=1)
    game.close()


def test_the_page_that_is_untried_says_so() -> None:
    text = (DOCS / "nemo-gym.md").read_text(encoding="utf-8")
    assert "**Untried.**" in text
    found = BLOCK.findall(text)
    assert len(found) == 3 and all(untested for _, untested, _ in found)
    for language, _, code in found:
        if language == "python":
            compile(code, "nemo-gym.md", "exec")
        elif language == "yaml":
            assert yaml.safe_load(code)["workflow"] == "agent_workflow"
