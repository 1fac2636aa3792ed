"""Layouts, and the models that support them, for the jobs of all files. Imports no engine."""

from dataclasses import astuple
from pathlib import Path

from roll_opd.config.plan import Layout

RANKS = 4  # processes
VOCABULARY = 101  # odd: padded wherever the vocabulary is split
DEMO = Path(__file__).parents[2] / "examples" / "demo" / "models"
LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2),
    "tp2sp": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
    "tp2dp2": Layout(tp=2, dp=2),
    "tp2pp2": Layout(tp=2, pp=2),
    "tp2sppp2": Layout(tp=2, pp=2, sequence_parallel=True),
    "tp4": Layout(tp=4),
    "pp4": Layout(pp=4),
    "dp4": Layout(dp=4),
    "pp2dp2": Layout(pp=2, dp=2),
    "cp2": Layout(cp=2),
    "cp4": Layout(cp=4),
    "tp2spcp2": Layout(tp=2, cp=2, sequence_parallel=True),
    "pp2cp2": Layout(pp=2, cp=2),
    "cp2dp2": Layout(cp=2, dp=2),
    "pp2vpp2": Layout(pp=2, vpp=2),
    "pp2vpp2dp2": Layout(pp=2, vpp=2, dp=2),
    "tp2pp2vpp2": Layout(tp=2, pp=2, vpp=2),
    "pp2vpp2cp2": Layout(pp=2, vpp=2, cp=2),
    "ep2": Layout(dp=2, ep=2),
    "ep4": Layout(dp=4, ep=4),
    "tp2ep2": Layout(tp=2, ep=2, etp=1),
    "cp2ep2": Layout(cp=2, ep=2),
    "pp2ep2": Layout(pp=2, dp=2, ep=2),
    "tp2etp2ep2": Layout(tp=2, dp=2, ep=2),
    "tp2etp1": Layout(tp=2, etp=1),
    "tp2cp2ep2": Layout(tp=2, cp=2, ep=2, etp=1),
    "pp2vpp2ep2": Layout(pp=2, vpp=2, dp=2, ep=2),
}
EXPERT_MODELS = ("qwen3_moe", "qwen2_moe", "mixtral")
FAMILY_MODELS = ("smollm3", "seed_oss", "olmo2", "olmo3", "phi3", "phi3_long", "glm4", "glm4_moe", "gemma2", "gemma3")
EXPERT_FAMILY_MODELS = ("gpt_oss", "minimax_m2")  # without split experts
HYBRID_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
MODELS = ("qwen3", "qwen3_tied", "qwen2_tied", "llama", "llama3")
DEMO_MODELS = ("demo_student", "demo_teacher")


def model_path(root: Path, name: str) -> str:
    """Return the directory of a model: the demo's in the repository, random models under `root`."""
    return str(DEMO / name.removeprefix("demo_") if name in DEMO_MODELS else root / "models" / name)


def models(layout: str) -> tuple[str, ...]:
    """Return the random models that support a layout; one has enough layers for two stages of two parts."""
    more = {"tp1": ("yarn", "mistral"), "cp2": ("yarn",), "tp2pp2": ("mistral",)}
    return ("deep",) if LAYOUTS[layout].vpp else (*MODELS, *more.get(layout, ()))


def demo_models(layout: str) -> tuple[str, ...]:
    """Return the demo's models that support a layout; the student's three layers cannot be split into two equal
    stages."""
    return DEMO_MODELS if LAYOUTS[layout].pp == 1 else DEMO_MODELS[1:]


def axes(layout: str) -> tuple:
    """Return the sizes of a layout; a cover of layouts has each of them."""
    return astuple(LAYOUTS[layout])
