"""The critic: a Megatron model that ends in one number a token, the value of the state before it, and its training.

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

from roll_opd.algorithms.gae import clipped_values, value_loss
from roll_opd.config.plan import CriticPlan
from roll_opd.megatron.batches import PackedBatch
from roll_opd.megatron.export import Written, save_hf
from roll_opd.megatron.learner import MegatronLearner
from roll_opd.megatron.model import BuiltModel, PackedModel, build_model, unwrapped
from roll_opd.megatron.weights.source import Files
from roll_opd.models.weight_files import VALUE_HEAD
from roll_opd.samples.sample import Sample
from roll_opd.samples.training import TrainResult


class ValueHead(torch.nn.Module):
    """A linear map to one number, computed in f32, the same on every tensor rank.

    Its weight starts at 0, so every value does. It has the model's precision, since
    megatron-core 0.16.1 cannot save the state of a distributed optimizer over two; its master weight is f32.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(self, states_ME: Tensor) -> Tensor:
        return (states_ME.float() @ self.weight.float().T)[:, 0]


class TokenValueModel(PackedModel):
    """A GPT model that ends in values. `value_head` joins the last stage after the other weights are loaded."""

    value_head: ValueHead

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer

    def forward(self, batch: PackedBatch, temperature: float) -> Tensor:  # type: ignore[override]
        """Return f32 [M] on the last pipeline stage: values of the states before scored tokens; else hidden states.

        `temperature` is of distributions and not of values.
        """
        hidden = self.hidden_states(batch)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # every rank computes the same from the whole sequence, so its slice of the gradient is complete
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        values_m = self.value_head(self.before(hidden, batch))
        return values_m if batch.cut is None else batch.cut.whole(values_m)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # what GPTModel adds to this concerns the output layer
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)


class MegatronCritic(MegatronLearner):
    """A critic that is trained."""

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
        """Return the value of the state before every token after the prompt: entry t is of the state before token P+t.

        Arguments and result are those of `compute_logprobs`.
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
        """Make one optimizer update from a mini-batch with the columns of `objective.columns.value_columns`.

        `sums` holds `weighted_loss` (Σ over all ranks is the loss), and over this rank's action tokens: `tokens`,
        `values`, `squared_error` and `clipped` (tokens at which the clipped error was the larger). With `assigned`,
        `samples` are this data-parallel rank's shard alone: see `samples.dp_shards`.
        """
        loss = partial(_loss, clip=self.plan.value_clip)
        done = self._learn(samples, loss, 1.0, assigned=assigned)
        return TrainResult(done.sums, {}, done.grad_norm, done.learning_rate, done.applied)


def save_critic_hf(critic: MegatronCritic, directory: Path, *, later: bool = False) -> Written:
    """Do what `save_hf` does; the directory loads as a model for sequence classification with one label."""
    return save_hf(critic, directory, later=later, amended=_classifying)


def _classifying(config: dict[str, Any]) -> dict[str, Any]:
    kinds = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or []]
    return config | {"architectures": kinds, "id2label": {"0": "value"}, "label2id": {"value": 0}}


def _load_head(head: ValueHead, path: Path) -> None:
    """Load the head of a model that has one: a reward model, or a saved critic."""
    with Files(path) as files:
        if VALUE_HEAD not in files.names:
            return
        shape = files.shape(VALUE_HEAD)
        if shape != head.weight.shape:
            raise ValueError(
                f"{path}: {VALUE_HEAD} is {list(shape)}, a value head is {list(head.weight.shape)}; give a critic a"
                " model with one label, or one without a classification head"
            )
        with torch.no_grad():
            head.weight.copy_(files.part(VALUE_HEAD, 0, 0, 1))


def _loss(values_M: Tensor, batch: PackedBatch, *, clip: float | None) -> tuple[Tensor, dict]:
    columns = batch.columns
    mask_M = columns["mask"]
    # where, not a product with the weight: what is off the mask may be infinite
    old_M, returns_M = (torch.where(mask_M, columns[name], 0) for name in ("old_values", "returns"))
    loss = (value_loss(values_M, old_M, returns_M, clip) * columns["weight"]).sum()
    new_M = values_M.detach()
    error_M = (new_M - returns_M).square()
    held_M = new_M if clip is None else clipped_values(new_M, old_M, clip)
    sums = {
        "tokens": mask_M.sum(),
        "weighted_loss": loss.detach(),
        "values": new_M[mask_M].sum(),
        "squared_error": error_M[mask_M].sum(),
        "clipped": ((held_M - returns_M).square() > error_M)[mask_M].sum(),
    }
    return loss, {"sums": sums}
