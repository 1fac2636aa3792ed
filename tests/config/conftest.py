"""Fixtures of the configuration tests: a valid configuration, in which tests change single keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_assets import base_values, set_key, write_config

from roll_opd.base.failures import ConfigError
from roll_opd.config.plan import RunPlan
from roll_opd.planner.load_plan import load_plan


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def values(root: Path) -> dict[str, Any]:
    return base_values(root)


@pytest.fixture
def plan(root: Path, values: dict[str, Any]) -> Callable[..., RunPlan]:
    """Plan the base configuration after dotted-key changes (`...` removes a key)."""

    def make(changes: dict[str, Any] | None = None, overrides: tuple[str, ...] = (), **options: Any) -> RunPlan:
        for key, value in (changes or {}).items():
            set_key(values, key, value)
        return load_plan(write_config(root, values), "run", overrides, **{"pure": True, **options})

    return make


@pytest.fixture
def problems(plan: Callable[..., RunPlan]) -> Callable[..., list[str]]:
    """Plan a wrong configuration and return its problems."""

    def make(*args: Any, **options: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            plan(*args, **options)
        return caught.value.problems

    return make
