"""Critic and its training. The critic is a Megatron model with a value head.

The value head predicts the value of the state before each token.

Legend: N packed tokens, M scored tokens, E hidden size.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from roll_opd.config.plan import CriticPlan
from roll_opd.megatron.export import Written, save_hf
from roll_opd.megatron.learner_engine import MegatronLearner
from roll_opd.megatron.model_builder import BuiltModel, PackedModel, build_model, unwrapped
from roll_opd.megatron.packing import PackedBatch
from roll_opd.megatron.weights.source import FileSource
from roll_opd.models.weight_files import VALUE_HEAD
from roll_opd.objective.returns_and_gae import clipped_values, value_loss
from roll_opd.samples.micro_batches import TrainResult
from roll_opd.samples.sample import Sample


class ValueHead(torch.nn.Module):
    """Linear layer with one output, computed in f32; all tensor ranks have a copy.

    The weight of the layer is initialised to 0, so all initial values are 0. The weight has the dtype of the model,
    because megatron-core 0.16.1 cannot save a distributed optimizer whose parameters have two dtypes. The optimizer has
    a master copy of the weight in f32.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(self, states_ME: Tensor) -> Tensor:
        return (states_ME.float() @ self.weight.float().T)[:, 0]


class TokenValueModel(PackedModel):
    """GPT model with a value head.

    `value_head` is added to the last pipeline stage after the other weights are loaded.
    """

    value_head: ValueHead

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer

    def forward(self, batch: PackedBatch, temperature: float) -> Tensor:  # type: ignore[override]
        """Return the value of the state before each scored token, f32 [M].

        Only the last pipeline stage returns values; the other stages return hidden states. `temperature` has no effect.
        """
        hidden = self.hidden_states(batch)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # every rank computes the same values from the full sequence, so its slice of the gradient is complete
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        values_m = self.value_head(self.before(hidden, batch))
        return values_m if batch.owners is None else batch.owners.whole(values_m)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # GPTModel's version needs an output layer
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)


class MegatronCritic(MegatronLearner):
    """Training engine of the critic: computes values and updates the critic."""

    plan: CriticPlan

    def _build(self, seed: int) -> BuiltModel:
        built = build_model(self.plan, TokenValueModel, seed=seed, trainable=True, exact=self._exact)
        for model in map(unwrapped, built.chunks):
            assert isinstance(model, TokenValueModel)
            if model.post_process:
                model.value_head = ValueHead(built.weights.config)
                _load_head(model.value_head, Path(self.plan.model.path))
        return built

    def values(
        self, sequences: Sequence[tuple[np.ndarray, int]], assigned: list[list[int]] | None = None
    ) -> dict[int, np.ndarray] | None:
        """Return the value of the state before each token after the prompt.

        Entry t is for the state before token P+t, where P is the prompt length. The arguments and the form of the
        result are the same as in `compute_logprobs`.
        """
        samples = [Sample(tokens, prompt_length) for tokens, prompt_length in sequences]
        computed = self._forward(samples, 1.0, lambda values_M, _: {"values": values_M}, assigned)
        return None if computed is None else {number: arrays["values"] for number, arrays in computed.items()}

    def update(
        self,
        samples: Sequence[Sample],
        *,
        assigned: list[list[int]] | None = None,
    ) -> TrainResult:
        """Make one optimizer update from a mini-batch.

        The samples have the columns of `objective.columns.value_columns`. With `assigned`, `samples` are only this
        data-parallel rank's shard (see `samples.micro_batches`).

        The `sums` of the result are sums over this rank's samples:

        - `weighted_loss`: this rank's part of the loss. The sum over all ranks is the loss.
        - `tokens`, `values`, `squared_error`: number of action tokens, and the sums of their values and squared errors.
        - `clipped`: number of action tokens whose clipped error is larger than their unclipped error.
        """
        self.discard_gradient()
        loss = partial(_loss, clip=self.plan.value_clip)
        done = self._apply(self._add_gradient(samples, loss, 1.0, assigned=assigned))
        return TrainResult(done.sums, {}, done.grad_norm, done.learning_rate, done.applied)


def save_critic_hf(critic: MegatronCritic, directory: Path, *, later: bool = False) -> Written:
    """Save the critic as a Hugging Face sequence classification model with one label, in the way of `save_hf`."""
    return save_hf(critic, directory, later=later, amended=_classifier_config)


def _classifier_config(config: dict[str, Any]) -> dict[str, Any]:
    kinds = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or []]
    return config | {"architectures": kinds, "id2label": {"0": "value"}, "label2id": {"value": 0}}


def _load_head(head: ValueHead, path: Path) -> None:
    """Load the value head from a model, if the model has one. Reward models and saved critics have one."""
    with FileSource(path) as files:
        if VALUE_HEAD not in files.names:
            return
        shape = files.shape(VALUE_HEAD)
        if shape != head.weight.shape:
            raise ValueError(
                f"{path}: {VALUE_HEAD} has shape {list(shape)}, expected {list(head.weight.shape)}; use a model with"
                " one label, or without a classification head, for the critic"
            )
        with torch.no_grad():
            head.weight.copy_(files.part(VALUE_HEAD, 0, 0, 1))


def _loss(values_M: Tensor, batch: PackedBatch, *, clip: float | None) -> tuple[Tensor, dict]:
    columns = batch.columns
    mask_M = columns["mask"]
    # `where`, not a product, because values outside of the mask may be infinite
    old_M, returns_M = (torch.where(mask_M, columns[name], 0) for name in ("old_values", "returns"))
    loss = (value_loss(values_M, old_M, returns_M, clip) * columns["weight"]).sum()
    new_M = values_M.detach()
    error_M = (new_M - returns_M).square()
    clipped_M = new_M if clip is None else clipped_values(new_M, old_M, clip)
    sums = {
        "tokens": mask_M.sum(),
        "weighted_loss": loss.detach(),
        "values": new_M[mask_M].sum(),
        "squared_error": error_M[mask_M].sum(),
        "clipped": ((clipped_M - returns_M).square() > error_M)[mask_M].sum(),
    }
    return loss, {"sums": sums}
