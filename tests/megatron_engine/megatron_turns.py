"""A trainer whose memory is moved as the table of phases specifies, with engines and a reference policy.

The engines and the reference policy are only names, because the trainer's operations are the same without them.
"""

import random
from collections.abc import Callable
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import numpy as np
import torch

from roll_opd.megatron.learner_engine import MegatronLearner
from roll_opd.megatron.offload import OffloadedError
from roll_opd.models.device_phases import (
    LEARNING,
    SERVING,
    STATE,
    WEIGHTS,
    Kind,
    Move,
    Part,
    Phase,
    PhaseError,
    PhaseMachine,
    PhaseMember,
    State,
)

TRAINER, ENGINES, REFERENCE = "train", "infer", "reference"
ASKED = {  # phase -> the call of this phase, and the parts in device memory that it needs
    Phase.RESTORE: [(TRAINER, "load", STATE)],
    Phase.WEIGHT_SYNC: [(TRAINER, "export_weights", WEIGHTS), (ENGINES, "load_weights", WEIGHTS)],
    Phase.GENERATE: [(ENGINES, "generate", SERVING)],
    Phase.READ: [(REFERENCE, "compute_logprobs", WEIGHTS)],
    Phase.OLD_LOGPROBS: [(TRAINER, "compute_logprobs", WEIGHTS)],
    Phase.TRAIN: [(TRAINER, "update", LEARNING)],
    Phase.CHECKPOINT: [(TRAINER, "save", STATE)],
}
BEFORE_UPDATE = (Phase.WEIGHT_SYNC, Phase.GENERATE, Phase.READ, Phase.OLD_LOGPROBS, Phase.TRAIN)
AFTER_UPDATE = (Phase.WEIGHT_SYNC, Phase.GENERATE, Phase.READ, Phase.CHECKPOINT)
RANDOM_ORDERS = 100
COMPARED = (Part.WEIGHTS, Part.OPTIMIZER)


class InTurns:
    """Goes through phases, and compares the trainer's state after each phase with the state before."""

    def __init__(self, trainer: MegatronLearner) -> None:
        devices = frozenset({0})
        members = [
            PhaseMember(TRAINER, Kind.STUDENT, devices),
            PhaseMember(ENGINES, Kind.ENGINES, devices, keeps_weights=False),
            PhaseMember(REFERENCE, Kind.FROZEN, devices),
        ]
        self.trainer, self.machine, self.state = trainer, PhaseMachine(members), State()
        for name in (ENGINES, TRAINER, REFERENCE):
            self._make(self.machine.start(self.state, name))
        self.sizes: list[dict[str, int]] = []

    def phases(self, *order: Phase) -> None:
        for phase in order:
            self.phase(phase)

    def phase(self, phase: Phase) -> None:
        """Go through one phase; check that generation without weights is refused, and go through weight sync first."""
        if phase is Phase.GENERATE and self.state.blank:
            try:
                self.machine.enter(self.state, phase)
            except PhaseError as error:
                assert ENGINES in str(error) and "weight_sync" in str(error), error
            else:
                raise AssertionError("engines without weights generate")
            self.phase(Phase.WEIGHT_SYNC)
        self._make(self.machine.enter(self.state, phase))
        for name, call, needs in ASKED[phase]:
            self._make(self.machine.act(self.state, name, call, needs))
            if call == "load_weights":
                self.state = self.machine.sent(self.state)
            self._check(phase)

    def in_any_order(self) -> None:
        """Go through phases in random orders, and check that no state is lost."""
        self.phase(Phase.TRAIN)
        before, views = self._values(), self._views()
        logprobs = self.trainer.compute_logprobs(data.sequences(layouts.VOCABULARY), 1.0)
        drawn = random.Random(5)  # the same on every rank
        for _ in range(RANDOM_ORDERS):
            self.phase(drawn.choice(list(ASKED)))
            if Part.WEIGHTS in self.state.of(TRAINER):
                found = self.trainer.compute_logprobs(data.sequences(layouts.VOCABULARY), 1.0)
                _assert_same_logprobs(found, logprobs)
        self.phase(Phase.TRAIN)
        assert self._views() == views
        after = self._values()
        for part in COMPARED:
            assert len(after[part]) == len(before[part])
            assert all(torch.equal(one, other) for one, other in zip(after[part], before[part], strict=True)), part
        assert all(not gradient.any() for gradient in after[Part.GRADIENTS])
        self.sizes.append(self._bytes())

    def keep_gradient(self, add: Callable[[], Any], step: Callable[[], Any]) -> None:
        """Accumulate a gradient, with phases after each call; check that it is the gradient without phases."""
        found = []
        calls = 1 if self.trainer.plan.optimizer.overlap_grad_reduce else 2
        for between in ((Phase.TRAIN,), (Phase.GENERATE, Phase.READ, Phase.TRAIN), (Phase.CHECKPOINT, Phase.TRAIN)):
            self.phase(Phase.TRAIN)
            for _ in range(calls):
                add()
                self.phases(*between)
            gradients = self._values()[Part.GRADIENTS]
            found.append((gradients, step().grad_norm))
            assert any(bool(gradient.any()) for gradient in gradients)
        for gradients, norm in found[1:]:
            assert norm == found[0][1] > 0
            if calls > 1:  # a reduction in the background may or may not have begun
                assert all(torch.equal(one, other) for one, other in zip(gradients, found[0][0], strict=True))
        self.phase(Phase.GENERATE)
        assert not self.trainer.memory._offloaded[Part.GRADIENTS][0].copy  # after an update, nothing is copied

    def _check(self, phase: Phase) -> None:
        """Check that offloaded memory is released, and that using it is an error that names role and phase."""
        held, found = self.state.of(TRAINER), self._bytes()
        for part in (*COMPARED, Part.GRADIENTS):
            assert (found[part] > 0) == (part in held) or part is Part.OPTIMIZER, (phase, part, found, held)
            assert part in held or not found[part]
        if Part.WEIGHTS not in held:
            try:
                self.trainer.compute_logprobs(data.sequences(layouts.VOCABULARY), 1.0)
            except OffloadedError as error:
                assert error.args[0].startswith(f"{TRAINER} cannot compute") and "since the phase" in str(error), error
            else:
                raise AssertionError("log-probs of weights that are away")
            self.sizes.append(found)

    def _make(self, made: tuple[list[Move], State]) -> None:
        moves, self.state = made
        for move in moves:
            if move.member == TRAINER and move.away:
                self.trainer.offload(move.parts, self.state.phase)
            elif move.member == TRAINER:
                self.trainer.memory.onload(move.parts)

    def _bytes(self) -> dict[str, int]:
        return {str(part): size for part, size in self.trainer.memory.bytes_on_device().items()}

    def _values(self) -> dict[Part, list[torch.Tensor]]:
        tensors = self.trainer._tensors()
        return {part: [tensor.detach().clone() for tensor in values] for part, values in tensors.items()}

    def _views(self) -> list[Any]:
        """Return the addresses of parameters, and of gradients to which the output head adds, in Megatron's buffers."""
        buffers = [buffer for chunk in self.trainer.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        places: list[Any] = []
        for buffer in buffers:
            for parameter in buffer.params:
                gradient = parameter.main_grad
                assert gradient.untyped_storage()._cdata == buffer.grad_data.untyped_storage()._cdata
                places.append((gradient.storage_offset(), gradient.shape))
                if buffer.param_data is not None:
                    assert parameter.untyped_storage()._cdata == buffer.param_data.untyped_storage()._cdata
                    places.append((parameter.storage_offset(), parameter.shape))
        return places


def _assert_same_logprobs(found: dict[int, np.ndarray] | None, before: dict[int, np.ndarray] | None) -> None:
    assert (found is None) == (before is None)
    for number, values in (before or {}).items():
        assert found is not None and np.array_equal(found[number], values)
        # what a model without weights says of every token
        assert len(values) < 2 or not np.allclose(values, -np.log(layouts.VOCABULARY), atol=1e-3)
