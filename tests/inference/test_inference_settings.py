"""Engine arguments that a user may set, and the plugin that vLLM loads in every process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import ModelPlan
from roll_opd.inference import engine_arguments, plugin

STUDENT = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"
KNOWN = {"gpu_memory_utilization", "block_size", "max_num_seqs", "load_format", "seed", "compilation_config"}


def resolve(on_cpu: bool = True, **engine_args: object) -> dict:
    return engine_arguments.resolve_engine_args(
        ModelPlan(str(STUDENT), "bf16"),
        max_model_len=32,
        seed=3,
        tensor_parallel_size=1,
        on_cpu=on_cpu,
        engine_args=FrozenDict(engine_args),
    )


@pytest.mark.parametrize("on_cpu", [True, False])
def test_several_ranks_are_processes_of_the_engine_itself(on_cpu: bool) -> None:
    """In a placement group vLLM would leave them to Ray, which would wait for devices that the run uses."""
    arguments: dict = {"max_model_len": 32, "seed": 3, "tensor_parallel_size": 2, "on_cpu": on_cpu}
    model = ModelPlan(str(STUDENT), "bf16")
    assert (
        engine_arguments.resolve_engine_args(model, engine_args={}, **arguments)["distributed_executor_backend"] == "mp"
    )
    own = {"distributed_executor_backend": "ray"}
    assert (
        engine_arguments.resolve_engine_args(model, engine_args=own, **arguments)["distributed_executor_backend"]
        == "ray"
    )


def test_an_unknown_argument_names_its_nearest_and_all_are_reported() -> None:
    wrong = {"gpu_memory_utilisation": 0.5, "seed": 1, "block_size": 16}
    with pytest.raises(ValueError) as caught:
        engine_arguments.check_engine_args(wrong, KNOWN)
    message = str(caught.value)
    assert "'gpu_memory_utilisation'" in message and "did you mean 'gpu_memory_utilization'?" in message
    assert "'seed' cannot be set here" in message and "block_size" not in message


def test_a_users_arguments_win_over_defaults_and_arrive_as_plain_containers() -> None:
    assert resolve()["enforce_eager"] is True
    arguments = resolve(enforce_eager=False, compilation_config={"cudagraph_capture_sizes": [1, 2]})
    assert arguments["enforce_eager"] is False
    assert type(arguments["compilation_config"]) is dict
    assert arguments["compilation_config"] == {"cudagraph_capture_sizes": [1, 2]}
    assert arguments["dtype"] == "bfloat16" and arguments["seed"] == 3


def test_cpu_defaults_stay_on_the_cpu() -> None:
    assert "enforce_eager" not in resolve(on_cpu=False)
    assert resolve(on_cpu=False, enable_chunked_prefill=True)["enable_chunked_prefill"] is True
    with pytest.raises(ValueError, match="enable_chunked_prefill"):
        resolve(on_cpu=True, enable_chunked_prefill=True)
    assert [resolve(on_cpu=True, block_size=size)["block_size"] for size in (1, 16, 32, 33)] == [32, 32, 32, 64]
    assert resolve(on_cpu=False, block_size=16)["block_size"] == 16 and "block_size" not in resolve(on_cpu=True)


def test_the_kv_cache_grows_with_the_sequences_up_to_a_limit() -> None:
    model = ModelPlan(str(STUDENT), "fp32")  # 3 layers, 2 heads of 32 for keys and values
    token = 2 * 3 * 2 * 32 * 4
    assert engine_arguments.kv_cache_bytes(model, 80, 64, block=128, tp=1) == 64 * 256 * token
    assert engine_arguments.kv_cache_bytes(model, 129, 1, block=128, tp=2) == 384 * token / 2
    assert engine_arguments.kv_cache_bytes(model, 80, 10**6, block=128, tp=1) == 2**30
    assert engine_arguments.kv_cache_bytes(model, 10**6, 64, block=16, tp=1) == (10**6 + 16) * token > 2**30
    assert resolve(kv_cache_memory_bytes=5)["kv_cache_memory_bytes"] == 5
    assert "kv_cache_memory_bytes" not in resolve(on_cpu=False)


def test_the_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_KVCACHE_SPACE": "7", "VLLM_PLUGINS": "other"})
    engine_arguments.prepare_environment(eager_on_cpu=True)
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert os.environ["VLLM_PLUGINS"] == "other,roll_opd"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_the_entry_point_is_installed_and_registering_twice_is_harmless() -> None:
    engine_arguments.check_plugin_is_installed()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    plugin.register()
    plugin.register()
    assert plugin.BACKENDS.keys() <= WeightTransferEngineFactory._registry.keys()


def test_a_core_that_ends_leaves_no_file(tmp_path: Path) -> None:
    """In a separate process, with a group initialised through a file, as in an engine core without rank processes."""
    script = (
        "import os, sys, torch.distributed as dist\n"
        "from roll_opd.inference.plugin import remove_rendezvous_file as leave\n"
        "leave()\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "assert os.path.exists(sys.argv[1])\n"
        "leave(), leave()\n"
        "sys.exit(os.path.exists(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "meeting")]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


def test_a_model_is_inspected_without_a_new_process_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("on GPUs, an import may initialise CUDA")
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
    plugin._inspect_here()
    assert registry._run_in_subprocess(os.getpid) == os.getpid()
