"""The rows of `algorithm_type`: their values, refused combinations, and the merging of arguments."""

import pytest

from roll_opd.objective.algorithms import algorithm, algorithm_names, check_combination, merged_arguments
from roll_opd.objective.registry import POLICY_LOSSES


@pytest.mark.parametrize("name", algorithm_names())
def test_every_row_is_sound(name: str) -> None:
    row = algorithm(name)
    assert not check_combination(
        policy_loss=row.policy_loss,
        advantage=row.advantage,
        kl_loss=row.kl_loss,
        reference=row.kl_loss is not None,
        critic=row.advantage == "gae",
        teachers=name == "on_policy_distill",
        expert_data_ratio=row.expert_data_ratio,
    )


SOUND = {"policy_loss": "ppo", "advantage": "grpo"}


@pytest.mark.extras
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy_loss": "sft"}, "policy loss sft reads no advantages, so advantage grpo would have no effect"),
        (
            {"policy_loss": "sft", "teachers": True},
            "so the teachers' term, which is a part of the advantages, would have no effect",
        ),
        ({"advantage": None}, "which are 0 without an advantage function"),
        ({"advantage": "on_policy_distill"}, "which is 0 without a teacher"),
        ({"advantage": "gae"}, "advantage gae needs the values of a critic, but there is none"),
        ({"critic": True}, "only advantage gae uses a critic's values, but the advantage is grpo"),
        ({"kl_loss": "k1", "reference": True}, "k1 as a KL loss has the gradient of log π, which"),
        ({"kl_loss": "kl", "reference": True}, "kl as a KL loss has the gradient of log π, which"),
        ({"kl_loss": "k2"}, "a KL loss (k2) needs a reference policy, but there is none"),
        ({"policy_loss": "dpo", "advantage": None}, "policy loss dpo needs a reference policy, but there is none"),
        (
            {"policy_loss": "dpo", "advantage": None, "reference": True, "loss_agg_mode": "token-mean"},
            "loss_agg_mode token-mean would weight pairs by their length",
        ),
        ({"policy_loss": "mix"}, "with expert_data_ratio 0 one of these two parts is empty"),
        (
            {"policy_loss": "mix_chord", "expert_data_ratio": 1.0},
            "with expert_data_ratio 1 one of these two parts is empty",
        ),
        ({"expert_data_ratio": 0.5}, "would treat demonstrations as the student's samples"),
    ],
)
def test_unsound_combinations(changes: dict, reason: str) -> None:
    assert not check_combination(**SOUND)
    assert any(reason in sentence for _, sentence in check_combination(**SOUND | changes))


def test_a_full_divergence_needs_no_advantages() -> None:
    assert not check_combination(policy_loss="sft", advantage=None, teachers=True, opd_objective="full")


def test_arguments_are_merged_over_defaults() -> None:
    defaults = POLICY_LOSSES.defaults("ppo")
    merged, unknown = merged_arguments({"clip_range_high": 0.3, "clip_range": 0.1, "clip_ratio_c": 5.0}, defaults)
    assert merged == {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 5.0, "ratio_type": "token"}
    assert unknown == ()
    assert merged_arguments({"epsilom": 1}, defaults)[1] == ("epsilom",)
    assert merged_arguments({}, defaults)[0] == defaults
