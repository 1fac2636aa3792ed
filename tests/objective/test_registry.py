"""Losses and advantages by name: registered in the package, by a user, or given by dotted path."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_opd.base.entry_points import entries
from roll_opd.base.registry import Registry, defaults
from roll_opd.objective.advantages.reward_normalisation import Normalised, RewardBatch
from roll_opd.objective.algorithms import DIVERGENCE_NAMES, KL_LOSSES, KL_PENALTIES, algorithm
from roll_opd.objective.divergences import DIVERGENCES
from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.reference_kl import KL_ESTIMATORS
from roll_opd.objective.registry import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageFacts,
    AlgorithmError,
    advantage,
    policy_loss,
    register_advantage,
    register_policy_loss,
)


def test_importing_the_registry_needs_no_torch() -> None:
    code = "import sys, roll_opd.objective.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", POLICY_LOSSES.builtin)
def test_the_configuration_can_give_every_argument_of_a_loss(name: str) -> None:
    """Each argument has a default, and a loss has the arguments of ROLL's pg_clip keys if it declares them."""
    policy_loss(name, POLICY_LOSSES.defaults(name))
    clips = {"clip_low", "clip_high", "dual_clip"}
    assert not POLICY_LOSSES.facts(name).reads_pg_clip or clips <= POLICY_LOSSES.defaults(name).keys()


@pytest.mark.parametrize("name", ADVANTAGES.builtin)
def test_the_configuration_can_give_every_argument_of_an_advantage(name: str) -> None:
    advantage(name, ADVANTAGES.defaults(name))
    assert ADVANTAGES.facts(name).token_defaults.keys() <= {"gamma", "lambd", "whiten_advantages"}


@pytest.mark.parametrize("registry", [POLICY_LOSSES, ADVANTAGES])
def test_what_is_read_of_a_function_is_what_it_is_registered_with(registry: Registry[Any]) -> None:
    read = {name: (registry.facts(name), registry.defaults(name)) for name in registry.builtin}
    functions = {name: registry.find(name) for name in registry.builtin}
    assert read == {
        name: (registry._registered[name][1], defaults(function, given_by_us=1)) for name, function in functions.items()
    }
    modules = pkgutil.iter_modules(importlib.import_module(registry.package).__path__, f"{registry.package}.")
    names = {*(module.name for module in modules), *(entry.module for entry in entries(registry.group).values())}
    parts = {id(part) for name in names for part in vars(importlib.import_module(name)).values()}
    assert {name for name, (part, _) in registry._registered.items() if id(part) in parts} == set(read)
    assert all(registry.declared(name).facts is not None for name in registry.builtin)  # without an import


def test_one_function_under_several_names_has_the_facts_of_each() -> None:
    whitened = {"gamma": 1.0, "whiten_advantages": True}
    assert advantage("gae") is advantage("reinforceplusplus") is advantage("reinforce")
    assert ADVANTAGES.facts("reinforceplusplus") == AdvantageFacts(token_defaults=whitened)
    assert ADVANTAGES.facts("gae") == AdvantageFacts(token_defaults=whitened | {"lambd": 1.0})
    path = "roll_opd.objective.advantages.advantage_functions.reinforce"
    assert ADVANTAGES.facts("reinforce") == ADVANTAGES.facts(path) == AdvantageFacts()


def test_a_users_function_brings_its_facts() -> None:
    @register_advantage("best_of_prompt", baseline=True, token_defaults={"gamma": 0.5})
    def best_of_prompt(batch: RewardBatch, *, margin: float = 0.25) -> Normalised:
        return Normalised.of(batch.rewards_B, batch.rewards_B + margin)

    assert ADVANTAGES.facts("best_of_prompt") == AdvantageFacts(baseline=True, token_defaults={"gamma": 0.5})
    assert ADVANTAGES.defaults("best_of_prompt") == {"margin": 0.25}
    assert "best_of_prompt" not in ADVANTAGES.builtin


def test_names_that_need_no_torch_are_those_of_functions() -> None:
    assert set(DIVERGENCE_NAMES) == DIVERGENCES.keys()
    assert {*KL_LOSSES, *KL_PENALTIES} == KL_ESTIMATORS.keys()
    for name, meant in KL_PENALTIES.items():
        sample = torch.tensor([0.5]), torch.tensor([0.1])
        same = name == "k3" or KL_ESTIMATORS[name](*sample).equal(KL_ESTIMATORS[meant](*sample))
        assert same and meant in KL_PENALTIES


EXTENDING = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the page's loss, advantage and algorithm into one module."""
    code = re.findall(r"```python\n(.*?)```", EXTENDING.read_text(encoding="utf-8"), flags=re.DOTALL)
    parts = [text for text in code if "cubic" in text or '"best_of_batch"' in text]
    (tmp_path / "my_algorithms.py").write_text("\n".join(parts) + "\nNUMBER = 3\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "my_algorithms"


def test_a_users_functions_by_path_and_by_name(mine: str) -> None:
    loss = policy_loss(f"{mine}.cubic", {"power": 2})
    assert policy_loss("cubic") is loss
    ones = torch.ones(2)
    made = LossBatch(ones.log(), ones.log(), ones, ones.bool(), (2,))
    assert loss(made, power=2).tolist() == [-1.0, -1.0]
    found = advantage(f"{mine}.best_of_batch")(RewardBatch(torch.tensor([1.0, 3.0]), ["a", "a"]))
    assert found.rewards.tolist() == [-2.0, 0.0]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ppoo", {}, "unknown policy loss 'ppoo'; did you mean 'ppo'. Known are .*ppo, .*or a dotted path"),
        ("nowhere.at_all", {}, "the module nowhere cannot be imported"),
        ("my_algorithms.square", {}, r"my_algorithms \(.*\) has no function named square"),
        ("my_algorithms.NUMBER", {}, r"my_algorithms \(.*\) has no function named NUMBER"),
        ("my_algorithms.cubic", {"exponent": 2}, "cannot be called with {'exponent': 2}: exponent: unknown argument"),
        ("ppo", {"clip": 2}, "cannot be called with {'clip': 2}"),
    ],
)
def test_what_cannot_be_used_is_explained(mine: str, name: str, arguments: dict, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        policy_loss(name, arguments)


def test_a_registered_name_becomes_a_path_that_workers_can_import(mine: str) -> None:
    policy_loss(f"{mine}.cubic")  # imports the module, which registers it
    assert POLICY_LOSSES.located("cubic") == f"{mine}.cubic"
    assert POLICY_LOSSES.located("ppo") == "ppo"
    assert POLICY_LOSSES.located("not.imported") == "not.imported"

    def local() -> None: ...

    local.__module__ = "__main__"
    register_policy_loss("local")(local)
    with pytest.raises(AlgorithmError, match=r"policy loss local: the workers cannot import __main__.*into a module"):
        POLICY_LOSSES.located("local")


def test_the_row_of_a_users_own_algorithm(mine: str) -> None:
    assert algorithm(f"{mine}.ROW").policy_loss_args == {"power": 5}
    with pytest.raises(AlgorithmError, match=r"algorithm my_algorithms\.NUMBER: my_algorithms has no Algorithm named"):
        algorithm(f"{mine}.NUMBER")
