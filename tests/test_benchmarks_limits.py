"""The arithmetic of `limits.py` and `scaling.py`: FLOPs against PyTorch's own counter, fits against known powers."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.models.flops import TRAINED, forward_flops, sequence_flops

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
OWN = ("limits", "scaling", "work", "models", "machine_rates", "process_memory", "loglog", "pipeline_run")
SIZES = {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 72}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in OWN:
        sys.modules.pop(name, None)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Any, Any]:
    """Return a Hugging Face model, and the facts from its directory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from roll_opd.models.model_info import read_model

    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True, attn_implementation="eager"))
    model.save_pretrained(tmp_path)
    return model, read_model(tmp_path)


@pytest.mark.slow
def test_flops_are_those_that_pytorch_counts_token_by_token(tiny):
    """With a cache, a token's query is multiplied only by keys up to its position, so causal attention is counted."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    (model, info), (length, predicted, cache) = tiny, (11, 4, None)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for place in range(length):
            hidden = model.model(torch.tensor([[place]]), past_key_values=cache, use_cache=True)
            cache = hidden.past_key_values
            if place >= length - predicted:
                model.lm_head(hidden.last_hidden_state)
    assert sequence_flops(info, length, predicted) == counter.get_total_flops()


@pytest.mark.slow
def test_a_backward_pass_has_twice_the_flops(tiny):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model, info = tiny
    tokens = torch.arange(10)[None]
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    every_pair = 10 * 10  # without a cache the counter takes attention for one that is not causal
    assert TRAINED * forward_flops(info, 10, lambda window: every_pair, 10) == counter.get_total_flops()


@pytest.fixture
def plan() -> Any:
    from roll_opd.planner.load_plan import load_plan

    return load_plan("demo", "onpolicy_distill", ("++validation=null",), pure=True)


ROW = {"tokens/prompt_length/mean": 11.0, "tokens/response_length/mean": 30.0, "tokens/response_length/max": 40.0}


def test_work_of_the_demo(benchmark, plan):
    """256 sequences of 11 + 30 tokens; the student has 3 layers of 2 x 32 wide heads, the teacher 4 layers."""
    work = benchmark("work")
    found = work.phase_work(plan, ROW)
    assert set(found) == {"generate", "teacher", "train", "weight_sync"}  # one update a step
    attention, mlp = 4 * 96 * 64, 3 * 96 * 256
    layers, keys = 3 * (attention + mlp), sum(range(1, 42))
    forward = 256 * (2 * layers * 41 + 4 * 3 * 64 * keys + 2 * 96 * 320 * 30)
    assert found["train"].flops == 3 * forward
    student = 656_624 // 2  # bytes of its file, of which the header is a part
    assert found["weight_sync"].bytes == pytest.approx(4 * student * 3, rel=0.01)  # into either engine
    assert found["generate"].flops < forward  # a prompt counts once for its four answers
    keys_of_answers = 256 * sum(range(12, 41))
    for at_once, steps in ((128, 40), (32, 128 * 30 / 32)):  # of an engine: of the longest answer, or of its four turns
        engines = replace(plan.rollout, engine_args=FrozenDict({"max_num_seqs": at_once}))
        generate = work.phase_work(replace(plan, rollout=engines), ROW)["generate"]
        assert generate.bytes == 2 * steps * 4 * (layers + 96 * 320) + keys_of_answers * 2 * 3 * 64 * 4


def test_runs_that_are_not_counted(benchmark):
    from roll_opd.planner.load_plan import load_plan

    work = benchmark("work")
    plan = load_plan("demo", "onpolicy_distill", ("opd_objective=full",), pure=True)
    with pytest.raises(work.UncountedError, match="sampled"):
        work.check_counted(plan)


def test_shares_are_of_the_slower_of_computing_and_moving(benchmark, plan):
    limits, work = benchmark("limits"), benchmark("work")
    best = {name: {"flops": 1e11, "bytes": 2e10} for name in work.phase_devices(plan)}
    lap = {"generate": 0.5, "teacher": 0.25, "train": 0.75, "weight_sync": 0.1, "other": 0.4}
    row = {**{f"time/{name}": seconds for name, seconds in lap.items()}, "time/step": 2.0, **ROW, "tokens/step": 9.0}
    result = limits.compare(plan, [{**row, "rollout/generated_tokens": 5.0}], best)
    counted = work.phase_work(plan, ROW)
    phases = result["phases"]
    assert phases["train"]["share"] == pytest.approx(counted["train"].flops / 0.75 / 1e11)
    assert phases["weight_sync"]["share"] == pytest.approx(counted["weight_sync"].bytes / 0.1 / 2e10)
    least = sum(phase["least_seconds"] for phase in phases.values())
    assert result["step"]["share"] == pytest.approx(least / 2.0)  # the teacher shares the engine's slot
    assert all(name in limits.table(result) for name in ("generate", "weight_sync", "generate + teacher", "step"))


@pytest.mark.parametrize("parameters", [1e6, 2.5e6, 20e6, 80e6, 1e9])
def test_shapes_have_the_parameters_asked_for(benchmark, parameters):
    models = benchmark("models")
    shape = models.shape_of(parameters)
    hidden = shape["hidden_size"]
    width = shape["num_attention_heads"] * shape["head_dim"]
    of_keys = shape["num_key_value_heads"] * shape["head_dim"]
    layer = 2 * hidden * width + 2 * hidden * of_keys + 3 * hidden * shape["intermediate_size"]
    assert shape["num_hidden_layers"] * layer + models.VOCAB * hidden == pytest.approx(parameters, rel=0.1)
    assert shape["num_attention_heads"] % 4 == shape["num_key_value_heads"] % 4 == 0  # for four tensor ranks


def test_a_model_too_small_for_its_vocabulary_is_refused(benchmark):
    with pytest.raises(ValueError, match="choose more"):
        benchmark("models").shape_of(1e5)


@pytest.mark.slow
def test_a_made_model_is_the_same_every_time(benchmark, tmp_path):
    models = benchmark("models")
    for name in ("one", "same", "other"):
        models.make_model(tmp_path / name, 1.2e6, seed=2 if name == "other" else 1)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same != other


def test_exponents_are_found(benchmark):
    scaling = benchmark("scaling")
    x = [100.0, 200.0, 400.0, 800.0]
    assert scaling.exponent(x, [3 * value**1.5 for value in x]) == pytest.approx(1.5)
    for power in (0.5, 1.0, 2.0):
        assert scaling.growing_exponent(x, [700 + 0.01 * value**power for value in x]) == (
            pytest.approx(power) if power > 1 else None  # by less than a twentieth
        )
        assert scaling.growing_exponent(x, [700 + 50 * (value / 100) ** power for value in x]) == pytest.approx(power)
    assert scaling.growing_exponent(x, [5 * value for value in x]) == pytest.approx(1)
    assert scaling.last_growth(x, [700, 700, 1100, 1900]) == pytest.approx(1)
    assert scaling.last_growth(x, [700, 700, 700, 1900]) is None


def test_the_verdict_compares_the_exponent_with_the_work(benchmark):
    verdict = benchmark("scaling").verdict
    assert verdict({"exponent": 0.9, "last": 1.0, "of_work": 1.0}, "length") == ""
    assert verdict({"exponent": 1.2, "last": 1.3, "of_work": 1.0}, "length") == "SUPERLINEAR"
    assert verdict({"exponent": 1.2, "last": 1.3, "of_work": 1.15}, "length") == "superlinear, as its work is"
    assert verdict({"exponent": 1.4, "last": 1.3, "of_work": 1.15}, "length") == "SUPERLINEAR"
    assert verdict({"exponent": 0.8, "last": 1.3, "of_work": 1.0}, "length") == "superlinear at the end"
    assert verdict({"exponent": -0.9, "last": 2.0, "of_work": 0.0}, "ranks") == ""
    assert verdict({"exponent": 0.2, "last": 0.2, "of_work": 0.0}, "ranks") == "grows"


def points() -> list[dict[str, Any]]:
    return [
        {
            "factor": factor,
            "phases": {
                "train": {"seconds": 0.1 * factor, "flops": 1e9 * factor, "bytes": 1.0, "against": 100 * factor},
                "weight_sync": {"seconds": 0.1, "flops": 0.0, "bytes": 5.0, "against": 100 * factor},
            },
            "step_seconds": 0.1 + 0.1 * factor,
            "peak_bytes": {"student": 2**29 + 2**28 * factor**2, "driver": 2**28},
            "all_gib": 4.0,
            "device_gib": None,
        }
        for factor in (1, 2, 4, 8)
    ]


def test_the_table_and_the_plot_show_every_phase_and_role(benchmark):
    scaling, loglog = benchmark("scaling"), benchmark("loglog")
    result = {"points": points(), **scaling.fitted(points(), "batch")}
    assert result["phases"]["train"]["exponent"] == pytest.approx(1)
    assert result["roles"]["student"]["exponent"] == pytest.approx(2)
    assert result["roles"]["driver"]["exponent"] is None
    text = scaling.table("batch", result)
    assert "flat" in text and text.count("SUPERLINEAR") == 1
    drawn = ElementTree.fromstring(loglog.drawn(scaling.panels({"batch": result}), columns=2))
    labels = {node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"train (1.00)", "weight_sync (0.00)", "student", "driver"} <= labels


def test_every_point_of_an_axis_is_a_plan(benchmark):
    from roll_opd.planner.load_plan import load_plan

    scaling = benchmark("scaling")
    for axis, factor, sequences, devices in (("batch", 8, 256, 1), ("length", 4, 32, 1), ("ranks", 4, 128, 4)):
        plan = load_plan("demo", "onpolicy_distill", tuple(scaling.settings_of(axis, factor)), pure=True)
        assert plan.sequences_per_step == plan.student.mini_batch_sequences == sequences
        assert len(plan.student.devices) == devices


def test_processes_have_roles(benchmark):
    memory = benchmark("process_memory")
    seen = memory.Seen
    warm = {
        1: seen(0, "python start_onpolicy_distill_pipeline.py", 1),
        2: seen(1, "python -c server", 1),
        3: seen(2, "ray::RolloutWorker", 1),
        4: seen(2, "ray::TrainWorker.update", 1),
        5: seen(2, "ray::LogprobWorker", 1),
        6: seen(2, "python -c server", 1),
        7: seen(1, "raylet", 1),
        8: seen(2, "ray::IDLE", 1),
    }
    roles = {1: "driver", 3: "rollout", 4: "student", 5: "teacher", 6: "engine"}
    assert memory.role_of(warm, 1) == roles
    cold = {**warm, 6: seen(3, "VLLM::EngineCore", 1)}
    cold = {pid: seen(7, one.title, 1) if one.parent == 2 else one for pid, one in cold.items()}
    assert memory.role_of(cold, 1) == roles
    assert memory.high_water("Name:\tx\nVmHWM:\t  12 kB\n") == 12 * 1024
    assert memory.high_water("Name:\tx\nState:\tZ\n") == 0


@pytest.mark.parametrize("arguments", [["--steps", "1"], ["--factors", "2"], ["--axis", "depth"]])
def test_nothing_to_fit_is_refused(benchmark, arguments):
    with pytest.raises(SystemExit) as ended:
        benchmark("scaling").parse(arguments)
    assert ended.value.code == 2
