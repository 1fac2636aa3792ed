"""Models by name: which files of a repository a plan needs, and which a run needs in addition."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from roll_opd.base import hub
from roll_opd.base.failures import ConfigError
from roll_opd.base.hub import Download, HubError, HubName
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import RunPlan
from roll_opd.models.model_files import INDEX, SINGLE, read_json
from roll_opd.models.tokenizer_files import has_tokenizer

# files of the top directory: the configuration, the tokenizer, templates and the licence
DESCRIPTION = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "LICENSE*", "NOTICE*")
INDICES = "*.index.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def describing(files: Collection[str]) -> list[str]:
    """Return the files that a plan needs: configuration, tokenizer and templates, and a LoRA adapter.

    An adapter is small, and a plan reads its modules.
    """
    top = [file for file in files if "/" not in file and not fnmatchcase(file, INDICES)]
    return [file for file in top if file in ADAPTER or any(fnmatchcase(file, one) for one in DESCRIPTION)]


def whole(files: Collection[str]) -> list[str]:
    """Return the files that a run needs: those of `describing`, and the weights in safetensors.

    Copies of the weights are left out: *.bin, *.pth, *.gguf, subdirectories, and Mistral's consolidated.safetensors.
    """
    weights = [file for file in files if file == INDEX or fnmatchcase(file, "*.safetensors")]
    weights = [file for file in weights if "/" not in file and not file.startswith("consolidated")]
    if SINGLE in weights:
        shards = [file for file in weights if fnmatchcase(file, "model-*-of-*.safetensors")]
        weights = [INDEX, *shards] if INDEX in weights and shards else [SINGLE]
    if not weights:
        others = sorted(file for file in files if file.endswith((".bin", ".pth", ".pt", ".gguf")))
        found = f"only {', '.join(others[:3])}" if others else "none"
        raise HubError(f"the repository has no weights in safetensors ({found}); name a release with safetensors")
    return [*dict.fromkeys([*describing(files), *weights])]


def has_description(path: Path) -> bool:
    """Return whether a directory in the cache has what a plan reads."""
    return (path / "config.json").is_file() and has_tokenizer(path)


def has_weights(path: Path) -> bool:
    """Return whether a directory has all its weights, or all files of an adapter."""
    if all((path / file).is_file() for file in ADAPTER):
        return True
    if (path / INDEX).is_file():
        shards = read_json(path / INDEX).get("weight_map")
        files = set(shards.values()) if isinstance(shards, dict) else {SINGLE}
        return all((path / str(file)).is_file() for file in files) or (path / SINGLE).is_file()
    return (path / SINGLE).is_file()


def local_model(name: HubName) -> Path:
    """Return the directory of a model in the cache, with at least the files that a plan reads.

    Files that are missing are downloaded, if `hub.downloading` permits it. Raises HubError.
    """
    found = hub.cached(name)
    if found and (has_description(found) or all((found / file).is_file() for file in ADAPTER)):
        pass
    elif hub.may_download() and not hub.is_offline():
        found = hub.fetch(name, describing)
    elif found is None or not ((found / "config.json").is_file() or (found / ADAPTER[0]).is_file()):
        raise hub.absent(name, "its configuration, tokenizer and weights in safetensors")
    hub.record(name, found.name)
    return found


def note_download(diag: Diagnostics, key: str, model: str, path: Path) -> bool:
    """Note that a run downloads the weights of `model`, which `key` names; return False if it does not.

    A run downloads weights if `model` is a name on a hub, and `path` is its directory in the cache without weights.
    """
    name = hub.hub_name(model, "model")
    if name is None or hub.name_of(path) is None or has_weights(path):
        return False
    if hub.is_offline():
        diag.unsupported_here(key, str(hub.offline(name)))
    elif all(one.name != name for one in diag.downloads):
        diag.downloads.append(Download(name, commit=path.name, key=diag.at(key), place=diag.where(key)))
    return True


def with_sizes(plan: RunPlan) -> RunPlan:
    """Return the plan with the sizes of its downloads. Raises ConfigError."""
    found, problems = _sizes(plan.downloads)
    if problems:
        raise ConfigError(problems)
    return replace(plan, downloads=tuple(found))


def download_weights(wanted: Sequence[Download]) -> list[str]:
    """Download the weights of models, after a line with the size of all. Return a sentence for each problem."""
    found, problems = _sizes(wanted)
    if not problems:
        try:
            hub.download(found)
        except HubError as error:
            at = next((one for one in wanted if str(error).startswith(str(one.name))), Download(wanted[0].name))
            problems.append(f"{at.key}: {error}{at.place}")
    return problems


def complete(paths: Sequence[str], variables: Mapping[str, str], say: Callable[[str], None]) -> list[str]:
    """Download the models whose directories in the cache of another host are `paths`, where they are not complete here.

    `variables` has that host's cache and hub. Return a sentence for each problem.
    """
    problems = []
    with hub.environment(variables), hub.downloading(say):
        for path in map(Path, paths):
            name = hub.commit_of(path)
            if name is None or (has_weights(path) and has_description(path)):
                continue
            try:
                hub.fetch(name, whole)
            except HubError as error:
                problems.append(str(error))
    return problems


def _sizes(wanted: Sequence[Download]) -> tuple[list[Download], list[str]]:
    """Return (downloads with the sizes of their files, problems)."""
    found, problems = [], []
    for one in wanted:
        try:
            with hub.pinned({str(one.name): one.commit}):
                found.append(hub.look_up(one.name, whole))
        except HubError as error:
            problems.append(f"{one.key}: {error}{one.place}")
    return found, problems
