"""Routes from the engine core equal those of Hugging Face's model, also for prompts in the prefix cache."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_models import Running, buckets_of, hf_logprobs, make_mixture, save_model, update_weights
from transformers import Qwen3MoeForCausalLM

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.router_replay import RouteTable

SAMPLING = SamplingPlan(max_new_tokens=12)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, warm: None) -> Iterator[Running]:
    path = save_model(make_mixture(seed=0), Path(tmp_path_factory.mktemp("mixture")))
    running = Running(path, routes=True, engine_args={"block_size": 32})
    yield running
    running.close()


@torch.no_grad()
def hf_routes(model: Qwen3MoeForCausalLM, tokens: Sequence[int]) -> np.ndarray:
    """[T, L, K]: the experts of each token in each layer, smallest number first."""
    logits = model(torch.tensor([list(tokens)]), output_router_logits=True).router_logits
    chosen = [layer.topk(model.config.num_experts_per_tok, dim=-1).indices.sort(-1).values for layer in logits]
    return torch.stack(chosen, 1).numpy()


@pytest.mark.nightly  # on every push: a run that replays an engine's routes in test_layout_runs.py
def test_routes_are_the_models(engine: Running) -> None:
    """Two rounds with weights in between; prompts that share their beginning, and one that is asked again."""
    shared = list(range(2, 42))
    prompts = [[*shared, 50 + number] for number in range(6)] + [[7], [8, 9], [*shared, 50]]
    for seed in (0, 1):
        model = make_mixture(seed)
        if seed:
            engine.run(update_weights(engine.engine, buckets_of(model), version=seed))
        for _ in range(2):
            answers = engine.batch(prompts, SAMPLING, range(len(prompts)))
            for prompt, answer in zip(prompts, answers, strict=True):
                whole = [*prompt, *answer.tokens.tolist()]
                np.testing.assert_allclose(answer.logprobs, hf_logprobs(model, whole)[len(prompt) - 1 :], atol=1e-5)
                assert answer.routes is not None and answer.routes.dtype == np.uint8
                np.testing.assert_array_equal(np.sort(answer.routes, -1), hf_routes(model, whole[:-1]))


def test_a_request_reads_its_own_cells() -> None:
    table = RouteTable(blocks=5, block_size=4, layers=2, choices=3, experts=300)
    written = torch.randint(0, 300, (20, 2, 3), generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        table.write(layer, torch.cat([torch.arange(4, 20), torch.tensor([-1])]), written[[*range(4, 20), 0], layer])
    blocks = [3, 1, 4]
    cells = torch.tensor([4 * block + place for block in blocks for place in range(4)])
    for tokens in (0, 1, 4, 7, 12):
        np.testing.assert_array_equal(table.read(blocks, tokens), written[cells[:tokens]].numpy())
