"""The gate for options of vLLM that may change the distribution of samples, and the draft model of speculation.

Such an option is admitted only with evidence: the engine check tests the samples of each step, and ends a run whose
engine does not sample from the student. An engine that rounds also needs a correction.
"""

from pathlib import Path
from typing import Any

from roll_opd.base.registry import type_problem
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import EngineCheckPlan, RolloutPlan
from roll_opd.config.schema import SamplingKeys, Top, Worker, changed, shared
from roll_opd.models.engine_options import ALTERING_OPTIONS, DRAFT_MODEL, DTYPE_NAMES, ROUNDING_OPTIONS
from roll_opd.models.hub_models import note_download
from roll_opd.models.model_info import ModelFilesError, find_model, read_model
from roll_opd.planner.layouts_and_devices import OPTIONS
from roll_opd.planner.objective_plan import read_correction

SHORTHANDS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
WITHOUT_DRAFT = ("ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")


def engine_check_plan(top: Top, rollout: RolloutPlan, diag: Diagnostics) -> EngineCheckPlan | None:
    """Return the test of the engine's samples, or None if they are not tested.

    An option of `ALTERING_OPTIONS` that no test of samples would judge is an error.
    """
    options, plain = rollout.engine_args, ("auto", DTYPE_NAMES[rollout.model.dtype])
    altering = {name: options[name] for name in ALTERING_OPTIONS if options.get(name) not in (None, *plain)}
    without = _evidence_lacks(top, rollout)
    for name, value in altering.items():
        found = f"with {value} {ALTERING_OPTIONS[name]}"
        if without:
            diag.error(f"{OPTIONS}.{name}", f"{found}, and {without}, or remove this option")
        elif name in ROUNDING_OPTIONS and read_correction(top) is None:
            diag.error(
                f"{OPTIONS}.{name}",
                f"{found}, so samples are not quite the student's; switch train_infer_correction on (is_weight or"
                " filters), or remove this option",
            )
        else:
            diag.note(f"{OPTIONS}.{name}", f"{found}; engine_check tests the samples of each step")
    if not top.engine_check:
        return None
    rounds = not ROUNDING_OPTIONS.isdisjoint(altering)
    return EngineCheckPlan(SamplingKeys(**shared(SamplingKeys, rollout.sampling)), is_corrected=rounds)


def _evidence_lacks(top: Top, rollout: RolloutPlan) -> str:
    """Return why no test of samples would end a run with a wrong engine, and the remedy; "" if a test does."""
    if top.engine_check is not True:
        does = "trains on samples that fail the test" if top.engine_check else "tests no samples"
        return f"engine_check: {top.engine_check or 'false'} {does}; set engine_check: true"
    if rollout.sampling.repetition_penalty != 1:
        penalty = f"{rollout.sampling.repetition_penalty:g}"
        return f"engine_check tests no samples with repetition_penalty {penalty}; set it to 1"
    return ""


def with_speculation(role: Worker) -> Worker:
    """Return a vLLM role with all options of speculation in `speculative_config`, and a checked draft model.

    The draft model is named by its absolute path.
    """
    args, written = dict(role.engine_args), role.diag.below(OPTIONS)
    given = args.get("speculative_config") or {}
    if problem := type_problem(dict[str, Any], given):
        written.error("speculative_config", problem)
        return role
    config = {name.replace("-", "_"): value for name, value in given.items()}
    for option in SHORTHANDS.keys() & args.keys():
        if SHORTHANDS[option] in config:
            written.error(option, f"contradicts speculative_config.{SHORTHANDS[option]}; keep only one of these keys")
        config[SHORTHANDS[option]] = args.pop(option)
    if not config:
        return role
    model, method = config.get("model"), config.get("method")
    if isinstance(model, str) and (method or _method_of(model)) not in WITHOUT_DRAFT:
        key = "spec_model" if "spec_model" in role.engine_args else "speculative_config.model"
        with written.catching(key, ModelFilesError):
            config["model"] = str(find_model(model))
            note_download(written, key, model, Path(config["model"]))
            is_whole = method in (None, DRAFT_MODEL) and not config.get("use_heterogeneous_vocab")
            if is_whole and role.info and (drafted := read_model(Path(config["model"])).vocab) != role.info.vocab:
                written.error(
                    key,
                    f"{model} has {drafted} token ids, the model of the engine {role.info.vocab}; give a model of the"
                    " same family, or set speculative_config.use_heterogeneous_vocab: true",
                )
    return changed(role, {"engine_args": {**args, "speculative_config": config}})


def _method_of(model: str) -> str:
    """Return the method of speculation that vLLM takes if a model but no method is written."""
    is_class = "." in model and all(map(str.isidentifier, model.split(".")))
    return "custom_class" if is_class else model if model in WITHOUT_DRAFT else DRAFT_MODEL
