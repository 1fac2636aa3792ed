"""A model whose samples state the version of its weights: which version computed the values that a token attends to.

All positions have the same embedding, and attention is uniform over the context. `v_proj` contains the code of the
version, and the row of `lm_head` with the same code belongs to the token of the version. So the token is the version
of most of the values in the KV cache, and it equals the version of the weights only if all of them are new.
"""

import asyncio
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from inference_models import SIZES, Running, buckets_of, update_weights
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"
FIRST = 320  # token of version 0; lower ids are those of the demo's tokenizer
VERSIONS = 1280
LENGTH = 512  # tokens of a conversation
WIDTH = SIZES["hidden_size"]
V_PROJ = "model.layers.0.self_attn.v_proj.weight"
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def codes() -> torch.Tensor:
    """f32 [VERSIONS, WIDTH]: ±1, and 0 in the dimension of the embedding. Any two have a product below 63 - 12."""
    made = torch.randint(0, 2, (VERSIONS, WIDTH), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    made[:, 0] = 0
    return made


CODES = codes()


def text_of(version: int) -> str:
    """Return the text of a version's token, which is a complete tool call."""
    return f'<tool_call>\n{{"name": "v{version}", "arguments": {{}}}}\n</tool_call>'


def make_emitting() -> Qwen3ForCausalLM:
    """Return the model of version 0."""
    sizes = SIZES | {"vocab_size": FIRST + VERSIONS, "num_hidden_layers": 1, "max_position_embeddings": LENGTH}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes | {"eos_token_id": 260})).float().eval()
    layer: Any = model.model.layers[0]
    with torch.no_grad():
        for weight in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.down_proj, model.lm_head):
            weight.weight.zero_()
        model.model.embed_tokens.weight.zero_()[:, 0] = 1
        layer.self_attn.o_proj.weight.copy_(torch.eye(WIDTH))
        layer.self_attn.v_proj.weight.copy_(value_weights(0))
        model.lm_head.weight[FIRST:] = 2 * CODES
    return model


def value_weights(version: int) -> torch.Tensor:
    """Return the weights of `v_proj`: the normalised embedding, √WIDTH in dimension 0, becomes the version's code."""
    made = torch.zeros(WIDTH, WIDTH)
    made[:, 0] = CODES[version] / WIDTH**0.5
    return made


def spans(tokens: Sequence[int], sampled: Sequence[bool] | None = None) -> tuple:
    """Return the runs of versions that tokens state; None for tokens that were not sampled."""
    stated = [
        token - FIRST if is_sampled else None
        for token, is_sampled in zip(tokens, [True] * len(tokens) if sampled is None else sampled, strict=True)
    ]
    return tuple((version, len(list(run))) for version, run in groupby(stated))


class Emitting(Running):
    """An engine with this model, and its updates."""

    def __init__(self, directory: Path, runner: asyncio.Runner | None = None, **arguments: Any) -> None:
        model = make_emitting()
        model.save_pretrained(directory)
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO)
        free = [f"<unused{number}>" for number in range(FIRST - len(self.tokenizer))]
        assert self.tokenizer.add_tokens([*free, *map(text_of, range(VERSIONS))]) == len(free) + VERSIONS
        self.tokenizer.chat_template = TEMPLATE
        self.tokenizer.save_pretrained(directory)
        self._buckets = buckets_of(model)
        super().__init__(str(directory), max_model_len=LENGTH, runner=runner, **arguments)

    async def update(self) -> int:
        """Send the weights of the next version; return the version."""
        version = self.engine.updates.version + 1
        new = [
            {name: value_weights(version) if name == V_PROJ else tensor for name, tensor in bucket.items()}
            for bucket in self._buckets
        ]
        await update_weights(self.engine, new, version)
        return version
