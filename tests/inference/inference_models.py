"""Tiny random Qwen3 models on disk, their Hugging Face log-probs, and an event loop for engines."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from roll_opd.config.plan import ModelPlan
from roll_opd.inference.vllm_engine import InferenceEngine
from roll_opd.samples.weight_bucket import BucketMemory

VOCABULARY = 99  # not a multiple of vLLM's padding
MAX_MODEL_LEN = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_model(seed: int, tied: bool = False) -> Qwen3ForCausalLM:
    """Return a random model in which every weight, including norms, depends on `seed`."""
    torch.manual_seed(seed)
    return _all_random(Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)))


def make_mixture(seed: int) -> Qwen3MoeForCausalLM:
    """Return a mixture of experts with a width that the CPU kernels must pad."""
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    return _all_random(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)))


def make_latent(seed: int) -> DeepseekV3ForCausalLM:
    """Return a mixture of experts with latent attention of the only width that the CPU kernels support."""
    torch.manual_seed(seed)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 24}
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    config = DeepseekV3Config(**sizes, **experts, **groups, **widths, num_nextn_predict_layers=0)
    model: DeepseekV3ForCausalLM = _all_random(DeepseekV3ForCausalLM(config))
    gate: Any = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias.copy_(0.3 * torch.randn_like(gate.e_score_correction_bias))
    return model


def make_hybrid(seed: int) -> Qwen3_5ForCausalLM:
    """Return a Qwen3.5 model with sizes and precision that the CPU kernels support."""
    torch.manual_seed(seed)
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    widths = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    config = Qwen3_5TextConfig(**SIZES | {"num_hidden_layers": 4}, **linear, **widths)
    return _all_random(Qwen3_5ForCausalLM(config)).bfloat16()


def make_gpt_oss(seed: int) -> GptOssForCausalLM:
    """Make a gpt-oss model with a window that is shorter than the test's sequences."""
    torch.manual_seed(seed)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    config = GptOssConfig(
        **SIZES | {"intermediate_size": 128},  # what vLLM's kernel for CPUs computes on two ranks
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=rope | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    )
    model: GptOssForCausalLM = _all_random(GptOssForCausalLM(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):  # of experts
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_of(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a random model with every weight, including biases of routers, depending on `seed`."""
    torch.manual_seed(seed)
    # other attention than "eager" ignores caps of scores
    model: PreTrainedModel = _all_random(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn_like(buffer))
    return model


def _all_random(model: Any) -> Any:
    model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save_model(model: PreTrainedModel, path: Path) -> str:
    """Write `model` with a word-level tokenizer ("w17" is token 17; 1 is the end)."""
    model.save_pretrained(path)
    words = {"<pad>": 0, "</s>": 1} | {f"w{index}": index for index in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(path)
    return str(path)


@torch.no_grad()
def hf_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """f32 [T-1, V]: the logits that predict tokens 1..T-1."""
    return model(torch.tensor([list(tokens)])).logits[0, :-1].float()


def hf_logprobs(model: PreTrainedModel, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """f32 [T-1]: log-probs of tokens 1..T-1."""
    logprobs = torch.log_softmax(hf_logits(model, tokens) / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(list(tokens[1:]))[:, None])[:, 0].numpy()


def buckets_of(model: PreTrainedModel, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Return the weights as an exporter sends them; the parts of fused layers are in different buckets."""
    with tempfile.TemporaryDirectory() as directory:  # as they are on disk: in memory, experts are fused
        model.save_pretrained(directory)
        weights = dict(_by_expert(load_file(Path(directory, "model.safetensors"))))
    names = list(weights)
    return [{name: weights[name] for name in names[first::count]} for first in range(count)]


def _by_expert(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors; stacked experts of a layer are split into one tensor per expert."""
    for name, tensor in weights.items():
        block, found, part = name.partition(".mlp.experts.")
        if not found or part[0].isdigit():
            yield name, tensor
        else:
            yield from ((f"{block}.mlp.experts.{expert}.{part}", each) for expert, each in enumerate(tensor.unbind()))


async def update_weights(engine: InferenceEngine, buckets: Iterable[Mapping[str, torch.Tensor]], version: int) -> None:
    """Replace all weights of an engine. Each bucket has Hugging Face tensors by name."""
    await engine.updates.begin(version)
    memory, dtype = BucketMemory(), engine._llm.vllm_config.model_config.dtype
    try:
        for bucket in buckets:
            memory.clear()
            for name, tensor in bucket.items():
                memory.add(name, tensor, dtype)
            await engine.updates.load({**memory.describe(), "version": version})
        await engine.updates.finish()
    finally:
        memory.close()


def keeping_pause(engine: InferenceEngine) -> Callable[[Any], Awaitable[None]]:
    """Return a pause for updates that keeps the KV cache and the prefix cache of the old weights."""
    llm = engine._llm

    async def pause(mode: Any) -> None:
        await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)

    return pause


OPEN: set["Running"] = set()  # engines that run


class Running:
    """An engine with its event loop."""

    def __init__(
        self,
        path: str,
        dtype: str = "fp32",
        max_model_len: int = MAX_MODEL_LEN,
        runner: asyncio.Runner | None = None,
        **arguments: Any,
    ) -> None:
        self.runner = runner or asyncio.Runner()  # cancels at its end what is still running
        self.loop = self.runner.get_loop()
        starting = InferenceEngine.start(ModelPlan(path, dtype), max_model_len=max_model_len, seed=0, **arguments)
        self.blocked = 0.0  # longest part of the start, as a share of it, in which the event loop did nothing else
        self.engine = self.run(self._watched(starting))
        OPEN.add(self)

    async def _watched(self, starting: Coroutine[Any, Any, InferenceEngine]) -> InferenceEngine:
        times = [time.monotonic()]

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.02)
                times.append(time.monotonic())

        ticking = asyncio.create_task(tick())
        try:
            return await starting
        finally:
            ticking.cancel()
            times.append(time.monotonic())
            self.blocked = max(after - before for before, after in pairwise(times)) / (times[-1] - times[0])

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def batch(self, *arguments: Any) -> list[Any]:
        """Run `generate_batch` to its end; return the completions in the order of the prompts."""

        async def collect() -> list[Any]:
            found = {i: completion async for i, completion in self.engine.generate_batch(*arguments)}
            return [found[index] for index in sorted(found)]

        return self.run(collect())

    def close(self) -> None:
        """End the engine and its loop."""
        OPEN.discard(self)
        self.run(self.engine.close())
        self.runner.close()


def running(path: str, **arguments: Any) -> Iterator[Running]:
    """Body of a fixture: yield an engine, and end it with the fixture."""
    engine = Running(path, **arguments)
    yield engine
    engine.close()
