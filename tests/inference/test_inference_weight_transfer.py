"""Our weight-transfer backends match the interface of the installed vLLM, so renamed methods are found.

Tests import vLLM themselves: that takes seconds in each process that collects this file.
"""

import inspect
import pickle
from dataclasses import fields

import pytest
import torch

from roll_opd.inference.plugin import BACKENDS, register
from roll_opd.samples.weight_bucket import entry_of

CALLED = (  # by vLLM's worker, on our engines
    "__init__",
    "init_transfer_engine",
    "start_weight_update",
    "receive_weights",
    "finish_weight_update",
    "shutdown",
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_are_called_as_vllm_declares_it(backend: str) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    engine = WeightTransferEngineFactory._registry[backend]()
    assert issubclass(engine, WeightTransferEngine) and not inspect.isabstract(engine)
    for name in CALLED:
        wanted, found = (inspect.signature(getattr(kind, name)) for kind in (WeightTransferEngine, engine))
        assert list(found.parameters) == list(wanted.parameters), name
    assert WeightTransferConfig(backend=backend).backend == backend
    wanted = ["config", "vllm_config", "device", "model"]
    assert list(inspect.signature(WeightTransferEngineFactory.create_engine).parameters) == wanted


def test_front_end_and_worker_have_the_called_methods() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_worker import Worker

    requests = ("init_weight_transfer_engine", "update_weights")
    for name in (*requests, "start_weight_update", "finish_weight_update", "resume_generation"):
        assert inspect.iscoroutinefunction(getattr(AsyncLLM, name)), name
    for name in requests:
        assert list(inspect.signature(getattr(AsyncLLM, name)).parameters) == ["self", "request"]
    assert list(inspect.signature(Worker.update_weights).parameters) == ["self", "update_info"]
    assert list(inspect.signature(Worker.init_weight_transfer_engine).parameters) == ["self", "init_info"]


def test_ipc_update_info_survives_vllms_serialization() -> None:
    """Handles hold types and bytes; the last message holds none."""
    from roll_opd.weight_sync.cuda_receiver import CheckedIpcUpdateInfo, CheckedNcclUpdateInfo

    handles = {"GPU-1": (torch.Tensor, (3,), b"handle", torch.float32, 0)}
    reported = {"names": ["norm"], "dtype_names": ["float32"], "shapes": [[3]], "tensor_sizes": [12]}
    info = CheckedIpcUpdateInfo(**reported, ipc_handles=None, ipc_handles_pickled=None, handles=pickle.dumps(handles))
    assert info.ipc_handles == handles and info.entries is None
    last = {
        "names": [],
        "dtype_names": [],
        "shapes": [],
        "entries": [entry_of(["norm"], torch.ones(1, 3), torch.float32)],
    }
    assert CheckedIpcUpdateInfo(**last, handles=pickle.dumps({}), version=3).version == 3
    assert CheckedNcclUpdateInfo(**last, version=3).entries == last["entries"]
    for kind in (CheckedIpcUpdateInfo, CheckedNcclUpdateInfo):
        assert {"names", "dtype_names", "shapes"} <= {field.name for field in fields(kind)}


def test_a_weight_that_one_message_has_twice_is_refused() -> None:
    from roll_opd.weight_sync.verify_weights import WeightVerifier

    with pytest.raises(ValueError, match="sent twice in one update: norm"):
        WeightVerifier(torch.nn.Linear(3, 3)).expect([entry_of(["norm"], torch.ones(1, 3), torch.float32)] * 2, 1)


def test_packed_weights_are_cut_alike_on_both_sides() -> None:
    """vLLM's sender packs tensors; its receiver splits them by names, dtypes and shapes, in the same order."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

    torch.manual_seed(0)
    source = {f"w{n}": torch.randn(n + 1, 3).to(torch.bfloat16 if n % 2 else torch.float32) for n in range(7)}
    pairs, arrived = iter(source.items()), {}
    while chunk := pack_tensors(pairs, lambda item: item[1], buffer_size_bytes=90):
        sizes = [source[name].nbytes for name in chunk.names]
        arrived |= dict(unpack_tensor(chunk.packed_tensor, chunk.names, chunk.shapes, chunk.dtypes, sizes))
    assert list(arrived) == list(source) and all(torch.equal(arrived[name], source[name]) for name in source)
