"""Buckets of weights in Ray actors: the student's ranks that write them, and whoever brings them to another host."""

from collections.abc import Iterator, Sequence

import numpy as np
import ray

from roll_opd.samples.weight_bucket import BucketMemory, Description

Written = Iterator[tuple[BucketMemory, bool]]  # see `bucketed`


class OnHost:
    """An actor that says where it lives, and that can bring a bucket there for all who take weights on that host."""

    _held: BucketMemory | None = None

    def host(self) -> str:
        """Return the id of this node of Ray's."""
        return ray.get_runtime_context().get_node_id()

    def hold(self, content: np.ndarray, bucket: Description) -> Description:
        """Copy a bucket into memory that the processes of this host can map; return its description here."""
        self._held = self._held or BucketMemory()
        self._held.fill(content, bucket)
        return bucket | self._held.describe()

    def release_bucket(self) -> None:
        """Give back the memory of what was brought."""
        if self._held is not None:
            self._held.close()
            self._held = None


class WritesBuckets:
    """A rank of the student. The first one is asked for bucket after bucket; the others take part until its last."""

    _written: Written
    _memories: Sequence[BucketMemory] = ()
    _newest: BucketMemory

    def begin_writing(self, memories: Sequence[BucketMemory], dtype: str) -> Written:
        """Return all weights in buckets, written into `memories` by turns, for models of `dtype`; nothing elsewhere."""
        raise NotImplementedError

    def export_weights(self, dtype: str, memories: int) -> tuple[Description, bool] | None:
        """Begin, and return what `next_bucket` does; on other ranks than the first, take part to the end."""
        self._memories = [BucketMemory() for _ in range(memories)]
        self._written = self.begin_writing(self._memories, dtype)
        if memories:
            return self.next_bucket()
        left = list(self._written)  # taking part is to go through it
        assert not left
        return None

    def next_bucket(self) -> tuple[Description, bool]:
        """Write the next bucket into the memory whose turn it is; return where it is, and whether it is the last."""
        self._newest, is_last = next(self._written)
        return self._newest.describe(), is_last

    def share_bucket(self) -> list[ray.ObjectRef]:
        """Put the newest bucket into the object store, for other hosts."""
        return [ray.put(self._newest.content())]

    def end_export(self) -> None:
        """Give the memory back."""
        for memory in self._memories:
            memory.close()
        self._memories = ()
