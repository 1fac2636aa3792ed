"""An engine's memory on its device, given back while another role has the device, and taken back as it was.

What moves are storages, and not tensors: a storage is brought to the host and made empty, and later filled again, so
that every view stays the view that it was (parameters and gradients in Megatron's buffers, shards of the distributed
optimizer). Gradients are zeroed before they are used, so they are not copied. On a CPU the same is done with the host
as the device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_opd.models.device_phases import Part, Phase

TensorsOf = Callable[[], Mapping[Part, Iterable[Tensor]]]


class MemoryAwayError(RuntimeError):
    """An engine was asked for something while its memory was another role's."""


@dataclass(frozen=True)
class _Stored:
    """A storage that is empty, its size, and what was in it; None: nothing that matters."""

    storage: torch.UntypedStorage
    size: int
    copy: Tensor | None


class Memory:
    """The parts of an engine's memory, each either on its device or away."""

    def __init__(self, name: str, device: torch.device, tensors: TensorsOf, *, is_constant: bool) -> None:
        """`tensors` says what each part is made of now. With `is_constant`, weights never change: one copy is enough.

        A tensor belongs to the first part, in the order of `Part`, in which its storage is.
        """
        self._name, self._device, self._tensors, self._is_constant = name, device, tensors, is_constant
        self._away: dict[Part, list[_Stored]] = {}
        self._since: dict[Part, Phase] = {}
        self._copies: dict[Part, dict[int, Tensor]] = {}  # pinned memory is slow to get, and so it is kept

    def check(self, asked_for: str, *parts: Part) -> None:
        """MemoryAwayError unless these parts are on the device."""
        if missing := [part for part in parts if part in self._away]:
            since = self._since[missing[0]]
            raise MemoryAwayError(
                f"{self._name} was asked for {asked_for} while its {', '.join(missing)} were away: it gave them back in"
                f" the phase {since}, to roles that share its devices, and has not taken them back"
            )

    def bytes_on_device(self) -> dict[Part, int]:
        """Return what each part takes on the device."""
        return {part: sum(s.nbytes() for s in stored.values()) for part, stored in self._storages().items()}

    def give_back(self, parts: Iterable[Part], phase: Phase) -> None:
        """Leave the device to others in a phase. Parts that are away stay it."""
        storages = self._storages()
        torch.cuda.synchronize()
        for part in Part:
            if part in parts and part not in self._away:
                self._away[part] = self._stored(part, list(storages[part].values()))
                self._since[part] = phase
        torch.cuda.synchronize()  # the copies are complete
        for stored in self._away.values():
            for each in stored:
                each.storage.resize_(0)
        torch.cuda.empty_cache()

    def take_back(self, parts: Iterable[Part]) -> None:
        """Have parts on the device as they were. Parts that are there stay as they are."""
        for part in [part for part in Part if part in parts and part in self._away]:
            for each in self._away.pop(part):
                each.storage.resize_(each.size)
                values = _values(each.storage)
                if each.copy is None:
                    values.zero_()
                else:
                    values.copy_(each.copy, non_blocking=True)
        torch.cuda.synchronize()

    def _storages(self) -> dict[Part, dict[int, torch.UntypedStorage]]:
        """Return the storages of each part by their identity, which emptying does not change."""
        found: dict[Part, dict[int, torch.UntypedStorage]] = {part: {} for part in Part}
        taken: set[int] = set()
        tensors = self._tensors()
        for part in Part:
            for tensor in tensors.get(part, ()):
                storage = tensor.untyped_storage()
                if tensor.device.type == self._device.type and storage._cdata not in taken:
                    taken.add(storage._cdata)
                    found[part][storage._cdata] = storage
        return found

    def _stored(self, part: Part, storages: Sequence[torch.UntypedStorage]) -> list[_Stored]:
        if part is Part.GRADIENTS:
            return [_Stored(storage, storage.nbytes(), None) for storage in storages]
        constant = self._is_constant and part is Part.WEIGHTS
        known, stored = self._copies.pop(part, {}), []
        for storage in storages:
            size, copy = storage.nbytes(), known.get(storage._cdata)
            is_new = copy is None or len(copy) != size
            if copy is None or is_new:
                copy = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=_is_cuda(storage))
            if is_new or not constant:
                copy.copy_(_values(storage), non_blocking=True)
            stored.append(_Stored(storage, size, copy))
        if constant or any(_is_cuda(storage) for storage in storages):
            self._copies[part] = {each.storage._cdata: each.copy for each in stored if each.copy is not None}
        return stored


def _is_cuda(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cuda"


def _values(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of a storage, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
