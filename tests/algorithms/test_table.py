"""The table of algorithms: its rows, what its data says of the functions, and how a user adds to it."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roll_opd.algorithms import table
from roll_opd.algorithms.baselines import ADVANTAGES, RewardBatch
from roll_opd.algorithms.losses.batch import LossBatch
from roll_opd.algorithms.losses.table import POLICY_LOSSES
from roll_opd.config import algorithms
from roll_opd.config.algorithms import (
    ALGORITHMS,
    POLICY_LOSS_FUNCTIONS,
    AlgorithmError,
    algorithm,
    check_combination,
    located,
    merged_arguments,
)

# C R T B, schema, repeat, advantage, loss, KL loss, entropy
ROWS = """
    sft                0001 sft        -  -                  sft                  -   -
    ppo                1111 experience 1  gae                ppo                  k2  default
    grpo               0101 experience 2  grpo               ppo                  k2  default
    reinforceplusplus  0111 experience 2  reinforceplusplus  ppo                  k2  default
    rloo               0111 experience 2  rloo               ppo                  k2  default
    opmd               0101 experience 2  opmd               opmd                 k2  default
    asymre             0001 experience 2  asymre             opmd                 -   -
    dpo                0100 dpo        2  -                  dpo                  k2  -
    topr               0101 experience 2  reinforce          topr                 k2  default
    cispo              0101 experience 2  grpo               cispo                k2  default
    gspo               0101 experience 2  grpo               gspo                 k2  default
    sapo               0101 experience 2  grpo               sapo                 k2  default
    mix                0101 experience 8  grpo               mix                  k2  mix
    mix_chord          0101 experience 8  grpo               mix_chord            k2  mix
    raft               0001 experience -  -                  sft                  -   -
    sppo               0001 experience 2  opmd               sppo                 -   -
    rec                0101 experience 2  rec                rec                  k2  default
    multi_step_grpo    0101 experience 8  step_wise_grpo     ppo                  k2  default
    on_policy_distill  0011 experience 8  on_policy_distill  importance_sampling  -   -
"""


def test_rows() -> None:
    wanted = [line.split() for line in ROWS.split("\n") if line.strip()]
    found = [
        [
            name,
            "".join(
                str(int(flag))
                for flag in (
                    row.use_critic,
                    row.use_reference,
                    row.compute_advantage_in_trainer,
                    row.can_balance_batch,
                )
            ),
            row.schema,
            *(
                "-" if value is None else str(value)
                for value in (row.repeat, row.advantage, row.policy_loss, row.kl_loss, row.entropy)
            ),
        ]
        for name, row in ALGORITHMS.items()
    ]
    assert found == wanted and len(found) == 19


def keyword_defaults(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_data_of_losses_is_that_of_the_functions(name: str) -> None:
    assert keyword_defaults(POLICY_LOSSES[name]) == algorithms.LOSSES[name].defaults
    assert algorithms.LOSSES[name].clips <= {"clip_low", "clip_high", "dual_clip"}.issubset(
        algorithms.LOSSES[name].defaults
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_data_of_advantages_is_that_of_the_functions(name: str) -> None:
    assert keyword_defaults(ADVANTAGES[name]) == algorithms.ADVANTAGES[name].defaults


def test_data_knows_no_other_functions() -> None:
    assert algorithms.LOSSES.keys() == POLICY_LOSSES.keys()
    assert algorithms.ADVANTAGES.keys() - ADVANTAGES.keys() == {"on_policy_distill"}


def test_data_needs_no_torch() -> None:
    code = "import sys, roll_opd.config.algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_is_sound(name: str) -> None:
    row = ALGORITHMS[name]
    assert not check_combination(
        policy_loss=row.policy_loss,
        advantage=row.advantage,
        kl_loss=row.kl_loss,
        reference=row.use_reference,
        critic=row.use_critic,
        teachers=name == "on_policy_distill",
        expert_data_ratio=row.expert_data_ratio,
    )


SOUND = {"policy_loss": "ppo", "advantage": "grpo"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy_loss": "sft"}, "policy loss sft reads no advantages, so advantage grpo would change nothing"),
        ({"policy_loss": "sft", "teachers": True}, "so the teachers' term, which is part of them, would teach nothing"),
        ({"advantage": None}, "without an advantage function it is 0"),
        ({"advantage": "on_policy_distill"}, "without a teacher it is 0"),
        ({"advantage": "gae"}, "advantage gae reads the values of a critic, and there is none"),
        ({"critic": True}, "a critic's values are read by advantage gae only, and the advantage is grpo"),
        ({"kl_loss": "k1", "reference": True}, "k1 as a KL loss has the gradient of log π alone"),
        ({"kl_loss": "kl", "reference": True}, "kl as a KL loss has the gradient of log π alone"),
        ({"kl_loss": "k2"}, "measured against a reference policy, and there is none"),
        ({"policy_loss": "dpo", "advantage": None}, "compares with a reference policy, and there is none"),
        (
            {"policy_loss": "dpo", "advantage": None, "reference": True, "loss_agg_mode": "token-mean"},
            "loss_agg_mode token-mean would weigh pairs by their length",
        ),
        ({"policy_loss": "mix"}, "with expert_data_ratio 0 one of them is empty"),
        ({"policy_loss": "mix_chord", "expert_data_ratio": 1.0}, "with expert_data_ratio 1 one of them is empty"),
        ({"expert_data_ratio": 0.5}, "would take demonstrations for the student's own samples"),
    ],
)
def test_unsound_combinations(changes: dict, reason: str) -> None:
    assert not check_combination(**SOUND)
    assert any(reason in sentence for sentence in check_combination(**SOUND | changes))


def test_a_full_divergence_needs_no_advantages() -> None:
    assert not check_combination(policy_loss="sft", advantage=None, teachers=True, opd_objective="full")


def test_arguments_are_merged_over_defaults() -> None:
    defaults = algorithms.LOSSES["ppo"].defaults
    merged, unknown = merged_arguments({"clip_range_high": 0.3, "clip_range": 0.1, "clip_ratio_c": 5.0}, defaults)
    assert merged == {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 5.0, "ratio_type": "token"}
    assert unknown == ()
    assert merged_arguments({"epsilom": 1}, defaults)[1] == ("epsilom",)
    assert merged_arguments({}, defaults)[0] == defaults


DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 20
    (tmp_path / "my_algorithms.py").write_text(code + "\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_algorithms", raising=False)
    return "my_algorithms"


def test_a_users_functions_by_path_and_by_name(mine: str) -> None:
    loss = table.policy_loss(f"{mine}.cubic", {"power": 2})
    assert table.policy_loss("cubic") is loss
    ones = torch.ones(2)
    made = LossBatch(ones.log(), ones.log(), ones, ones.bool(), (2,))
    assert loss(made, power=2).tolist() == [-1.0, -1.0]
    found = table.advantage(f"{mine}.above_best")(RewardBatch(torch.tensor([1.0, 3.0]), ["a", "a"]))
    assert found.rewards.tolist() == [-2.0, 0.0]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ppoo", {}, "unknown policy loss 'ppoo'; known are .*ppo, .*or a dotted path"),
        ("nowhere.at_all", {}, "the module nowhere cannot be imported"),
        ("my_algorithms.square", {}, "my_algorithms has no function named square"),
        ("my_algorithms.NUMBER", {}, "my_algorithms has no function named NUMBER"),
        ("my_algorithms.cubic", {"exponent": 2}, "cannot be called with {'exponent': 2}: .*unexpected keyword"),
        ("ppo", {"clip": 2}, "cannot be called with {'clip': 2}"),
    ],
)
def test_what_cannot_be_used_is_explained(mine: str, name: str, arguments: dict, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        table.policy_loss(name, arguments)


def test_a_registered_name_becomes_a_path_that_workers_can_import(mine: str) -> None:
    table.policy_loss(f"{mine}.cubic")  # imports the module, which registers it
    assert located(POLICY_LOSS_FUNCTIONS, "cubic") == f"{mine}.cubic"
    assert located(POLICY_LOSS_FUNCTIONS, "ppo") == "ppo"
    assert located(POLICY_LOSS_FUNCTIONS, "not.imported") == "not.imported"

    def local() -> None: ...

    local.__module__ = "__main__"
    table.register_policy_loss("local")(local)
    with pytest.raises(AlgorithmError, match=r"policy loss local: the workers cannot import __main__.*into a module"):
        located(POLICY_LOSS_FUNCTIONS, "local")


def test_the_row_of_a_users_own_algorithm(mine: str) -> None:
    assert algorithm(f"{mine}.ROW").policy_loss_args == {"power": 5}
    with pytest.raises(AlgorithmError, match=r"algorithm my_algorithms\.NUMBER: my_algorithms has no Algorithm named"):
        algorithm(f"{mine}.NUMBER")
