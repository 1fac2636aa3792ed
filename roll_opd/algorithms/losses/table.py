"""The policy losses by the names a configuration uses; what they are called with is in `config.algorithms`."""

from collections.abc import Callable

from torch import Tensor

from roll_opd.algorithms.losses.demonstrations import mix, mix_chord
from roll_opd.algorithms.losses.likelihood import kimi15, opmd, sft, tis, topr, vanilla
from roll_opd.algorithms.losses.preference import dpo
from roll_opd.algorithms.losses.ratio import cispo, gspo, importance_sampling, ppo, sapo, sppo
from roll_opd.algorithms.losses.rec import rec
from roll_opd.config.algorithms import POLICY_LOSS_FUNCTIONS

PolicyLoss = Callable[..., Tensor]  # (LossBatch, **arguments) -> [M]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "sppo": sppo,
    "sft": sft,
    "vanilla": vanilla,
    "opmd": opmd,
    "tis": tis,
    "topr": topr,
    "kimi15": kimi15,
    "rec": rec,
    "mix": mix,
    "mix_chord": mix_chord,
    "dpo": dpo,
}
for _name, _function in POLICY_LOSSES.items():
    POLICY_LOSS_FUNCTIONS.register(_name)(_function)
