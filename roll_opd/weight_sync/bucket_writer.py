"""Ray actor mixins for weight buckets.

Student ranks write the buckets. One actor on each other host copies the buckets into the memory of its host.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import ray

from roll_opd.samples.weight_bucket import BucketMemory, Description

Written = Iterator[tuple[BucketMemory, bool]]  # see `bucketed`


class BucketHost:
    """Actor that returns the id of its Ray node and can copy a bucket into the memory of its host.

    All receivers on this host read the copy.
    """

    _held: BucketMemory | None = None

    def host(self) -> str:
        """Return the id of this actor's Ray node."""
        return ray.get_runtime_context().get_node_id()

    def hold(self, content: np.ndarray, bucket: Description) -> Description:
        """Copy a bucket into the shared memory of this host. Return the description of the copy."""
        self._held = self._held or BucketMemory()
        self._held.fill(content, bucket)
        return bucket | self._held.describe()

    def release_bucket(self) -> None:
        """Free the memory of the copied bucket."""
        if self._held is not None:
            self._held.close()
            self._held = None


class BucketWriter:
    """Student rank that exports weights.

    Rank 0 writes the buckets one by one. The other ranks only take part in the collective operations of the export.
    """

    _written: Written
    _memories: Sequence[BucketMemory] = ()
    _newest: BucketMemory

    def begin_writing(self, memories: Sequence[BucketMemory], dtype: str) -> Written:
        """Return an iterator that writes all weights as `dtype` into `memories` in turn.

        The iterator has no items on ranks above 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `begin_writing`")

    def export_weights(self, dtype: str, memories: int) -> tuple[Description, bool] | None:
        """Start the export and return the first bucket (see `next_bucket`).

        On ranks above 0, this call runs the whole export.
        """
        self._memories = [BucketMemory() for _ in range(memories)]
        self._written = self.begin_writing(self._memories, dtype)
        if memories:
            return self.next_bucket()
        left = list(self._written)  # runs the collectives
        assert not left
        return None

    def next_bucket(self) -> tuple[Description, bool]:
        """Write the next bucket into the next memory.

        Return the bucket's description, and whether it is the last bucket.
        """
        self._newest, is_last = next(self._written)
        return self._newest.describe(), is_last

    def share_bucket(self) -> list[ray.ObjectRef]:
        """Put the newest bucket into Ray's object store. Other hosts read it from this store."""
        return [ray.put(self._newest.content())]

    def end_export(self) -> None:
        """Free the memory of all buckets."""
        for memory in self._memories:
            memory.close()
        self._memories = ()
