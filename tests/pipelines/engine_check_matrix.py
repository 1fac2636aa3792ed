"""Runs with right and wrong engines: which of them the engine check refuses, in five modes and with several seeds.

Ray and the roles start once for each set of engine options; each run has its own plan, prompts and run directory. A
wrong engine is a healthy one that this program alters: its sampling settings, its computation, or the weights that it
receives. Results are added to `--json`, and runs that it contains already are left out.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from runs import REPOSITORY, SPREAD
from stage import PURE, TEACHER, WITH_TEACHER, Stage, optimizer_of
from test_engine_check import COLD

from roll_opd.cluster import ray_runtime
from roll_opd.cluster.forkserver.forkserver_start import fork_server
from roll_opd.pipelines import distill
from roll_opd.planner.load_plan import load_plan
from roll_opd.teachers.scoring import Teacher
from roll_opd.teachers.views import SameTokens
from roll_opd.tracking.run_directory import read_jsonl

SHORT = (
    "max_steps=2",
    "rollout_batch_size=32",
    "validation=null",
    "eval_steps=0",
    "save_steps=0",
    "teacher_preflight=false",
)
LORA = ("model_args.lora_target=all-linear", "model_args.lora_rank=4", "training_args.learning_rate=1.0e-2")
CORRECTION = "train_infer_correction={{filters: [{{enabled: true, ratio_low: 0.5, ratio_high: 2.0}}]}}"
# mode -> its configuration and settings
MODES: dict[str, tuple[tuple[str, str], tuple[str, ...]]] = {
    "pure": (PURE, ()),
    "mixed": (WITH_TEACHER, ()),
    "async": (PURE, ("async_generation_ratio=1", "max_steps=3")),
    "lora": (PURE, ()),
    # a workflow whose calls have other settings than the run
    "calls": (PURE, ("plugin_dir={place}/plugins", "workflow=cold", "deterministic=false")),
}
DIFFERENCE, SQUARE = "rollout/engine/difference", "rollout/engine/root_mean_square"
GENERATING, OPTION = "{infer}.generating_args.", "++{infer}.strategy_args.strategy_config."
NGRAM = OPTION + "speculative_config={{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}}"


@dataclass(frozen=True)
class Engine:
    """An engine to try.

    - `options`: settings with which the roles start; `{infer}` stands for the name of the engines' role.
    - `settings`: settings of a run.
    - `sampling`: what the engine samples with, instead of the run's settings.
    - `fault`: a function of this module that alters the model in the engine.
    """

    is_right: bool
    options: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    sampling: tuple[tuple[str, Any], ...] = ()
    fault: str = ""


ENGINES = {
    "as configured": Engine(True),
    "temperature 0.8": Engine(True, settings=(GENERATING + "temperature=0.8",)),
    "top_p 0.9": Engine(True, settings=(GENERATING + "top_p=0.9",)),
    "top_k 8": Engine(True, settings=(GENERATING + "top_k=8",)),
    "top_p, top_k, temperature": Engine(
        True, settings=(GENERATING + "top_p=0.95", GENERATING + "top_k=12", GENERATING + "temperature=0.9")
    ),
    "no prefix cache": Engine(True, options=(OPTION + "enable_prefix_caching=false",)),
    "8 sequences, blocks of 32": Engine(True, options=(OPTION + "max_num_seqs=8", OPTION + "block_size=32")),
    "two engines": Engine(True, options=("{infer}.device_mapping=[0,1]",)),
    "two ranks": Engine(True, options=("{infer}.device_mapping=[0,1]", OPTION + "tensor_parallel_size=2")),
    "fp8 KV cache, corrected": Engine(True, options=(OPTION + "kv_cache_dtype=fp8",), settings=(CORRECTION,)),
    "bf16 engine": Engine(True, options=("{infer}.model_args.dtype=bf16",)),
    "bf16": Engine(True, options=("{infer}.model_args.dtype=bf16", "{train}.model_args.dtype=bf16")),
    "n-gram speculation": Engine(True, options=(NGRAM,)),
    "draft model": Engine(
        True,
        options=(OPTION + "speculative_config={{model: examples/demo/models/student, num_speculative_tokens: 3}}",),
    ),
    "n-gram speculation, kernel of vLLM": Engine(False, options=(NGRAM,), fault="unexpanded"),
    "temperature 0.7 instead of 1": Engine(False, sampling=(("temperature", 0.7),)),
    "temperature 1 instead of 0.8": Engine(
        False, settings=(GENERATING + "temperature=0.8",), sampling=(("temperature", 1.0),)
    ),
    "top_p 0.9 instead of 1": Engine(False, sampling=(("top_p", 0.9),)),
    "top_k 2 instead of all": Engine(False, sampling=(("top_k", 2),)),
    "greedy": Engine(False, sampling=(("top_k", 1),)),
    "bias of a logit": Engine(False, fault="biased"),
    "other rope": Engine(False, fault="turned"),
    "weights in fp8": Engine(False, fault="rounded"),
    "a layer that keeps its weights": Engine(False, fault="half_sent"),
    "weights of the start": Engine(False, fault="stale"),
    "update at twice its scale": Engine(False, fault="doubled"),
}


def alter(worker: Any, fault: str) -> None:
    """Alter the model of a worker of vLLM's engine core, which must be in its original state or altered by this
    function; "" restores it."""
    import torch
    from vllm.v1.sample import rejection_sampler

    from roll_opd.inference.cpu_kernels import expanded

    def unexpanded(output: Any, *arguments: Any) -> None:
        expanded(output.long(), *arguments)

    kernel: Any = rejection_sampler.expand_kernel
    kernel._impl = unexpanded if fault == "unexpanded" else expanded
    if fault == "unexpanded":
        return
    model = worker.model_runner.model
    for name in ("compute_logits", "load_weights"):
        model.__dict__.pop(name, None)
    for module in model.modules():
        if hasattr(module, "original_cache"):
            module.cos_sin_cache = module.original_cache
            del module.original_cache
    if not fault:
        return
    compute, load, first = model.compute_logits, model.load_weights, {}

    def is_matrix(name: str) -> bool:  # norms and embeddings are compared with the sent ones when they arrive
        return name.endswith("_proj.weight")

    def biased(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        logits[:, 20] += 1.0
        return logits

    def changed(name: str, value: Any) -> Any:
        if not is_matrix(name):
            return value
        if fault == "rounded":
            return value.to(torch.float8_e4m3fn).to(value.dtype)
        start = first.setdefault(name, value.clone())
        if fault == "half_sent" and ".layers.1." not in name:
            return value
        return start + (value - start) * (2.0 if fault == "doubled" else 0.0)

    if fault == "biased":
        model.compute_logits = biased
    elif fault == "turned":
        for module in model.modules():
            if getattr(module, "cos_sin_cache", None) is not None and not hasattr(module, "original_cache"):
                module.original_cache = module.cos_sin_cache
                count = module.cos_sin_cache.shape[0]
                places = (torch.arange(count) * 0.9).long()
                module.cos_sin_cache = module.cos_sin_cache[places].contiguous()
    else:
        model.load_weights = lambda weights: load((name, changed(name, value)) for name, value in weights)


class Engines(Stage):
    """The roles of a run with `options`."""

    def alter(self, fault: str) -> None:
        """Alter the models of all engines; "" restores them."""

        def call(actor: Any, change: Callable[..., None], fault: str) -> None:
            llm = actor._engine._llm
            change_all = llm.collective_rpc(change, args=(fault,))
            asyncio.run_coroutine_threadsafe(change_all, llm.output_handler.get_loop()).result()

        actors = self._workers.sampler.engines.actors
        for actor in actors:
            ray.get(actor.__ray_call__.remote(call, alter, fault))

    def _teacher(self, plan: Any) -> Teacher:
        role = self._workers.scorers.teachers[0]
        return Teacher(plan, replace(role.scorer, name=plan.source.name), SameTokens(plan.name))


@contextmanager
def started(options: Sequence[str], place: Path, *, lora: bool) -> Iterator[Engines]:
    """Start Ray, student, teacher and engines."""
    (place / "plugins").mkdir(parents=True, exist_ok=True)
    (place / "plugins/cold.py").write_text(COLD)
    student = [f"++actor_train.{setting}" for setting in LORA] if lora else []
    written = [option.format(infer="actor_infer", train="actor_train") for option in options]
    plan = load_plan(
        *WITH_TEACHER,
        [*SHORT, *optimizer_of("actor_train"), TEACHER, *student, *written, CORRECTION.format()],
        pure=False,
    )
    with fork_server() as server, ray_runtime.ray_cluster(plan.devices_per_node), asyncio.Runner() as runner:
        server.serve(plan)
        yield Engines(plan, place, runner.get_loop())


def run(stage: Engines, name: str, mode: str, seed: int, options: Sequence[str], place: Path) -> dict[str, Any]:
    """Make one run; return what became of it."""
    engine, (config, of_mode) = ENGINES[name], MODES[mode]
    train, infer = ("student_train", "student_infer") if config == PURE else ("actor_train", "actor_infer")
    lora = [f"++{train}.{setting}" for setting in LORA] if mode == "lora" else []
    spread = [*SPREAD] if config == PURE else []
    written = [
        setting.format(infer=infer, train=train, place=place) for setting in (*of_mode, *options, *engine.settings)
    ]
    stage.alter(engine.fault)
    original, begun = distill.rollouts_of, time.monotonic()

    def rollouts_of(*args: Any) -> Any:
        made = original(*args)
        made.context = replace(made.context, sampling=replace(made.context.sampling, **dict(engine.sampling)))
        return made

    distill.rollouts_of = rollouts_of
    try:
        made = stage.run(
            *SHORT, *optimizer_of(train), *lora, *spread, *written, f"seed={seed}", config=config, place=place
        )
    finally:
        distill.rollouts_of = original
        stage.alter("")
    text = " ".join((made.path / "console.log").read_text().split())
    by = r"first samples|samples of step \d+|log-probs after the update to version \d+"
    refused = re.search(rf"does not sample from the student, by the ({by})", text)
    rows = [row for row in read_jsonl(made.path / "metrics.jsonl") if row["step"]]
    stored = made.path / "preflight.json"
    tables = json.loads(stored.read_text()) if stored.is_file() else {}
    last = re.findall(r"roll-opd: (.{1,300})", text)
    return {
        "engine": name,
        "right": engine.is_right,
        "mode": mode,
        "seed": seed,
        "exit": made.code,
        "steps": len(rows),
        "refused": refused and refused[1],
        "preflight": {row["check"]: [row["value"], row["verdict"]] for table in tables.values() for row in table},
        "z": [round(row["rollout/engine/z"], 2) for row in rows if "rollout/engine/z" in row],
        "bias": [float(f"{row['rollout/engine/bias']:.2g}") for row in rows if "rollout/engine/bias" in row],
        "difference": [float(f"{row[DIFFERENCE]:.2g}") for row in rows if DIFFERENCE in row],
        "root_mean_square": [float(f"{row[SQUARE]:.2g}") for row in rows if SQUARE in row],
        "compared": [row["rollout/engine/compared"] for row in rows if DIFFERENCE in row],
        "seconds": round(time.monotonic() - begun, 1),
        **({"message": last[-1]} if made.code and last and not refused else {}),
    }


def is_as_wanted(row: dict[str, Any]) -> bool:
    """Return whether a right engine ran to its end, or a wrong one was refused."""
    return bool(row["exit"] == 0 if row["right"] else row["exit"] == 1 and row["refused"])


def main() -> int:
    """Make the runs that are missing; return 1 if an engine was not judged as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks/results/engine_check.json")
    parser.add_argument("--place", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parsed = parser.parse_args()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # engines get functions of this program
    os.chdir(REPOSITORY)
    begun, left = time.monotonic(), True
    while left and time.monotonic() - begun < parsed.seconds:
        done = json.loads(parsed.json.read_text())["runs"] if parsed.json.exists() else []
        there = {(row["engine"], row["mode"], row["seed"]) for row in done}
        left = [
            (name, mode, seed)
            for seed in range(1, parsed.seeds + 1)
            for name in parsed.engines
            for mode in parsed.modes
            if (name, mode, seed) not in there
        ]
        if not left:
            break
        options, lora = ENGINES[left[0][0]].options, left[0][1] == "lora"
        alike = [cell for cell in left if ENGINES[cell[0]].options == options and (cell[1] == "lora") == lora]
        place = parsed.place / str(time.time_ns())
        with started(options, place, lora=lora) as stage:
            for name, mode, seed in alike:
                if time.monotonic() - begun > parsed.seconds:
                    break
                row = run(stage, name, mode, seed, options, place)
                done.append(row)
                print("" if is_as_wanted(row) else "NOT AS WANTED ", row, flush=True)
                parsed.json.write_text(text_of(done))
    made = json.loads(parsed.json.read_text())["runs"]
    print(f"{len(made)} runs{'' if left else ', all made'}; {sum(not is_as_wanted(row) for row in made)} not as wanted")
    return int(not all(map(is_as_wanted, made)))


def text_of(runs: Sequence[dict[str, Any]]) -> str:
    """Return the results as JSON, with one run per line."""
    about = {"cores": os.cpu_count(), "python": platform.python_version()}
    lines = ",\n".join("  " + json.dumps(run) for run in runs)
    return f'{{\n "machine": {json.dumps(about)},\n "runs": [\n{lines}\n ]\n}}\n'


if __name__ == "__main__":
    sys.exit(main())
