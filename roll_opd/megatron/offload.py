"""Offload of an engine's device memory to the host while other roles use the device.

Storages are moved, not tensors: a storage is copied to the host, emptied, and later refilled. So all views stay valid,
for example parameters and gradients in Megatron's buffers, and shards of the distributed optimizer. Gradients are
copied only while a gradient is accumulated; otherwise they are set to zero before use. On a CPU, host memory takes the
place of device memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_opd.models.device_phases import Part, Phase

TensorsOf = Callable[[], Mapping[Part, Iterable[Tensor]]]


class OffloadedError(RuntimeError):
    """An operation was called while the memory that it needs is offloaded."""


@dataclass(frozen=True)
class _Stored:
    """An emptied storage, with its original size and the host copy of its content.

    `copy` is None if the content is not kept.
    """

    storage: torch.UntypedStorage
    size: int
    copy: Tensor | None


class DeviceMemory:
    """Memory of an engine, divided into parts. Each part is either on the device or offloaded."""

    def __init__(self, name: str, device: torch.device, tensors: TensorsOf, *, is_constant: bool) -> None:
        """Create the memory of one engine. All parts are on the device.

        If a storage contains tensors of several parts, it belongs to the first of these parts in the order of `Part`.

        Args:
            name: name of the engine in error messages.
            tensors: function that returns the current tensors of each part.
            is_constant: the weights do not change, so they are copied to the host only at the first offload.
        """
        self._name, self._device, self._tensors, self._is_constant = name, device, tensors, is_constant
        self._offloaded: dict[Part, list[_Stored]] = {}
        self._since: dict[Part, Phase] = {}
        self._copies: dict[Part, dict[int, Tensor]] = {}  # kept, because allocating pinned memory is slow

    def check(self, action: str, *parts: Part) -> None:
        """Raise OffloadedError unless all `parts` are on the device.

        `action`: a verb phrase for the error message, for example "update".
        """
        if missing := [part for part in parts if part in self._offloaded]:
            since = self._since[missing[0]]
            raise OffloadedError(
                f"{self._name} cannot {action}: its {', '.join(missing)} are offloaded since the phase {since}, for"
                " roles that share its devices; load them first"
            )

    def bytes_on_device(self) -> dict[Part, int]:
        """Return the number of bytes on the device for each part."""
        return {part: sum(s.nbytes() for s in stored.values()) for part, stored in self._storages().items()}

    def offload(self, parts: Iterable[Part], phase: Phase, *, keeps_gradients: bool = False) -> None:
        """Move parts to the host and free their device memory. Parts that are already offloaded are skipped.

        Args:
            phase: the current phase, for the error message of `check`.
            keeps_gradients: whether the content of gradients is copied to the host. Otherwise it is lost.
        """
        storages = self._storages()
        torch.cuda.synchronize()
        for part in Part:
            if part in parts and part not in self._offloaded:
                is_kept = keeps_gradients or part is not Part.GRADIENTS
                self._offloaded[part] = self._stored(part, list(storages[part].values()), is_kept=is_kept)
                self._since[part] = phase
        torch.cuda.synchronize()  # the copies are complete
        for stored in self._offloaded.values():
            for each in stored:
                each.storage.resize_(0)
        torch.cuda.empty_cache()

    def onload(self, parts: Iterable[Part]) -> None:
        """Restore offloaded parts on the device. Gradients that were not copied are filled with zeros.

        Parts that are already on the device are skipped.
        """
        for part in [part for part in Part if part in parts and part in self._offloaded]:
            for each in self._offloaded.pop(part):
                each.storage.resize_(each.size)
                values = _values(each.storage)
                if each.copy is None:
                    values.zero_()
                else:
                    values.copy_(each.copy, non_blocking=True)
        torch.cuda.synchronize()

    def _storages(self) -> dict[Part, dict[int, torch.UntypedStorage]]:
        """Return the storages of each part, as {identity of the storage: storage}.

        Emptying a storage does not change its identity.
        """
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

    def _stored(self, part: Part, storages: Sequence[torch.UntypedStorage], *, is_kept: bool) -> list[_Stored]:
        if not is_kept:
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
    """Return a view of all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
