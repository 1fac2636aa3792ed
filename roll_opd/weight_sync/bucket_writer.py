"""Ray actor mixins that write and copy weight buckets.

The student's rank 0 writes the buckets into shared memory of its host. On every other host with receivers, one actor
copies each bucket into the memory of that host.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray

from roll_opd.cluster.lost_processes import NotSetUp
from roll_opd.models.device_phases import NOTHING, WEIGHTS, needs
from roll_opd.samples.weight_bucket import BucketMemory, Description

Written = Iterator[tuple[BucketMemory, bool]]  # see `bucketed`


class BucketHost:
    """Actor mixin that copies a weight bucket into the memory of its host.

    All receivers on this host read the copy.
    """

    _held: BucketMemory | None = None

    def __getattr__(self, name: str) -> Any:
        """Raise NotSetUp for the engine of a process that Ray has started again."""
        if name == "_engine":
            raise NotSetUp("its process has ended unexpectedly, and was started again")
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    @needs(NOTHING)
    def host(self) -> str:
        """Return the id of this actor's Ray node."""
        return ray.get_runtime_context().get_node_id()

    @needs(NOTHING)
    def hold(self, content: np.ndarray, bucket: Description) -> Description:
        """Copy a bucket into the shared memory of this host. Return the description of the copy.

        Args:
            content: bytes of the bucket.
            bucket: description of the bucket.
        """
        self._held = self._held or BucketMemory()
        self._held.fill(content, bucket)
        return bucket | self._held.describe()

    @needs(NOTHING)
    def release_bucket(self) -> None:
        """Free the memory of the copied bucket, if there is one."""
        if self._held is not None:
            self._held.close()
            self._held = None


class BucketWriter:
    """Actor mixin of a student rank that exports weights.

    Rank 0 writes the buckets one by one. All other ranks only take part in the collective operations of the export.
    """

    _written: Written
    _memories: Sequence[BucketMemory] = ()
    _newest: BucketMemory

    @needs(WEIGHTS)
    def begin_writing(self, memories: Sequence[BucketMemory], dtype: str, *, adapter: bool) -> Written:
        """Return an iterator that writes all weights, or only the adapter, in buckets.

        On rank 0, the iterator yields (memory of the bucket, whether it is the last bucket). On the other ranks, it
        yields nothing.

        Args:
            memories: shared memories, which are written in turn.
            dtype: dtype of the models that load the weights.
            adapter: write only the matrices of the adapter; otherwise, it is merged into the weights.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `begin_writing`")

    @needs(WEIGHTS)
    def export_weights(self, dtype: str, memories: int, *, adapter: bool = False) -> tuple[Description, bool] | None:
        """Start the export and return the first bucket, as `next_bucket` does.

        Ranks above 0 are called with `memories` = 0. On these ranks, the call runs the whole export and returns None.

        Args:
            dtype: dtype of the models that load the weights.
            adapter: write only the matrices of the adapter.
            memories: number of shared memories, which are written in turn.
        """
        self._memories = [BucketMemory() for _ in range(memories)]
        self._written = self.begin_writing(self._memories, dtype, adapter=adapter)
        if memories:
            return self.next_bucket()
        left = list(self._written)  # runs the collectives
        assert not left
        return None

    @needs(WEIGHTS)
    def next_bucket(self) -> tuple[Description, bool]:
        """Write the next bucket. Return (description of the bucket, whether it is the last)."""
        self._newest, is_last = next(self._written)
        return self._newest.describe(), is_last

    @needs(NOTHING)
    def share_bucket(self) -> list[ray.ObjectRef]:
        """Put the newest bucket into Ray's object store. Return a list with the reference.

        Other hosts read the bucket from the object store.
        """
        return [ray.put(self._newest.content())]

    @needs(NOTHING)
    def end_export(self) -> None:
        """End the export and free the memory of all buckets."""
        for memory in self._memories:
            memory.close()
        self._memories = ()
