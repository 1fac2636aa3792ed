"""Names of a rank's parts in a profile: each module and each step of the optimizer as a range of the profiler."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.profiler import record_function

PREFIX = "part:"
# end of a module's name in the model -> part; the innermost module with an entry counts
MODULES = {
    "embedding": "embedding",
    "input_layernorm": "norm",
    "pre_mlp_layernorm": "norm",
    "final_layernorm": "norm",
    "q_layernorm": "norm of queries and keys",
    "k_layernorm": "norm of queries and keys",
    "linear_qkv": "products",
    "linear_proj": "products",
    "linear_fc1": "products",
    "linear_fc2": "products",
    "core_attention": "attention",
    "self_attention": "rotary and layout",
    "mlp": "SwiGLU",
    "layers": "residual",
}


@contextmanager
def named_parts(rank: Any) -> Iterator[None]:
    """Record the parts of a rank while the context is open."""
    from roll_opd.megatron.model_builder import unwrapped
    from roll_opd.megatron.output_head import OutputHead

    with ExitStack() as stack:
        for chunk in rank.chunks:
            for path, module in unwrapped(chunk).named_modules():
                names = path.split(".")
                part = MODULES.get(names[-1]) or (
                    MODULES["layers"] if len(names) > 1 and names[-2] == "layers" else None
                )
                if part:
                    stack.enter_context(_module_recorded(module, part))
        stack.enter_context(_recorded(OutputHead, "logprobs", "head"))
        optimizer = getattr(rank, "optimizer", None)
        if optimizer is not None:
            stack.enter_context(_recorded(rank, "_all_finite", "gradients finite"))
            for each in optimizer.chained_optimizers:
                stack.enter_context(_recorded(each, "step_with_ready_grads", "optimizer"))
                stack.enter_context(_recorded(each, "get_grad_norm", "gradient norm"))
                stack.enter_context(_recorded(each, "prepare_grads", "gradient norm"))
            stack.enter_context(_recorded(optimizer, "get_grad_norm", "gradient norm"))
            stack.enter_context(_recorded(optimizer, "step", "gradient clipping"))
            for chunk in rank.chunks:
                stack.enter_context(_recorded(chunk, "zero_grad_buffer", "zeroed gradients"))
        yield


@contextmanager
def _module_recorded(module: Any, part: str) -> Iterator[None]:
    open_ranges: list[Any] = []

    def before(*_: Any) -> None:
        open_ranges.append(record_function(PREFIX + part))
        open_ranges[-1].__enter__()

    def after(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    hooks = module.register_forward_pre_hook(before), module.register_forward_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _recorded(owner: Any, name: str, part: str) -> Iterator[None]:
    inner, own = getattr(owner, name), vars(owner).get(name)

    def call(*args: Any, **settings: Any) -> Any:
        with record_function(PREFIX + part):
            return inner(*args, **settings)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
