"""Record the experts of each token in vLLM's engine core on a CPU, and return them in a request's last output.

vLLM's option `enable_return_routed_experts` cannot be used on a CPU: the option needs vLLM's second model runner, and
that runner needs Triton. On a CPU, the routers of a model therefore write the experts to a table. The table has one row
per slot of the KV cache, so the routes of tokens from the prefix cache are also known.

Legend: T tokens of a request, L layers, K experts of a token.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

RECORDS_ROUTES = "ROLL_OPD_RECORDS_ROUTES"  # environment variable: 1 makes `register` call `record_routes`

_TABLES: list["RouteTable"] = []  # at most one table, for the model of this engine core


class RouteTable:
    """Table with the experts of the token in each slot of the KV cache."""

    def __init__(self, blocks: int, block_size: int, layers: int, choices: int, experts: int) -> None:
        dtype = torch.uint8 if experts <= 256 else torch.int16
        self.block_size = block_size
        self._experts = torch.zeros(blocks * block_size, layers, choices, dtype=dtype)

    def write(self, layer: int, cells: torch.Tensor, experts: torch.Tensor) -> None:
        """Store the experts of n tokens in one layer.

        - `cells`: slots of the KV cache, [n]. Padding has the slot -1; its experts are written to slot 0, which is
          never read.
        - `experts`: experts of the tokens, [n, K].
        """
        self._experts[cells.clamp(min=0), layer] = experts.to(self._experts.dtype)

    def read(self, blocks: Sequence[int], tokens: int) -> np.ndarray:
        """Return the experts of the first `tokens` tokens of a request, [tokens, L, K].

        `blocks` are the numbers of the blocks that hold the KV cache of the request.
        """
        count = -(-tokens // self.block_size)
        cells = torch.tensor(blocks[:count], dtype=torch.long)[:, None] * self.block_size + torch.arange(
            self.block_size
        )
        return self._experts[cells.flatten()[:tokens]].numpy()


def record_routes() -> None:
    """Patch vLLM in this engine core to record and return routes. Idempotent.

    Call this function before the engine is built.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if hasattr(Scheduler._free_request, "__wrapped__"):
        return
    scheduler: Any = Scheduler
    scheduler._free_request = with_kept_routes(Scheduler._free_request)
    scheduler.update_from_output = with_returned_routes(Scheduler.update_from_output)
    runner: Any = CPUModelRunner
    runner.initialize_kv_cache = with_table(CPUModelRunner.initialize_kv_cache)


def with_table(initialize: Callable[..., None]) -> Callable[..., None]:
    """Wrap `CPUModelRunner.initialize_kv_cache` to create a table. The model's routers then write to this table."""

    @functools.wraps(initialize)
    def initialized(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(runner, kv_cache_config, *args, **kwargs)
        group = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        model = runner.vllm_config.model_config
        table = RouteTable(
            kv_cache_config.num_blocks,
            group.block_size,
            model.get_total_num_hidden_layers(),
            model.get_num_experts_per_tok(),
            model.get_num_experts(),
        )
        _TABLES[:] = [table]
        _write_to(table, runner.model)

    return initialized


def _write_to(table: RouteTable, model: torch.nn.Module) -> None:
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    def capture(layer: int, experts: torch.Tensor) -> None:
        of_layers: Any = get_forward_context().slot_mapping
        cells = next(iter(of_layers.values()), None) if of_layers else None
        if cells is not None:
            table.write(layer, cells[: len(experts)].long(), experts)

    for module in model.modules():
        if isinstance(module, MoERunner):
            router: Any = module.router
            router.set_capture_fn(functools.partial(capture, module.layer_id))


def with_kept_routes(free: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Scheduler._free_request` to read the routes of a request before other requests use its slots."""

    @functools.wraps(free)
    def freed(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = request.num_tokens - 1  # the last token was sampled but not computed
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        if _TABLES and len(blocks) * _TABLES[0].block_size >= tokens:
            kept = scheduler.__dict__.setdefault("_routes", {})
            kept[request.request_id] = _TABLES[0].read(blocks, tokens)
        return free(scheduler, request, *args, **kwargs)

    return freed


def with_returned_routes(update: Callable[..., dict[int, Any]]) -> Callable[..., dict[int, Any]]:
    """Wrap `Scheduler.update_from_output` to add the routes to the output of each finished request."""

    @functools.wraps(update)
    def updated(scheduler: Any, *args: Any, **kwargs: Any) -> dict[int, Any]:
        sent = update(scheduler, *args, **kwargs)
        kept = scheduler.__dict__.pop("_routes", {})
        for step in sent.values():
            for output in step.outputs:
                output.routed_experts = kept.get(output.request_id)
        return sent

    return updated
