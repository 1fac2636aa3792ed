"""Reads `track_with` and `tracker_kwargs`: which trackers a run has, and what each is given.

ROLL's form is one tracker and its arguments. Several trackers take a mapping of tracker name to arguments.
"""

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import ValidationError

from roll_opd.config.errors import Findings
from roll_opd.config.known_names import DOTTED
from roll_opd.config.schema import Run, Section, Texts

Mode = Literal["online", "offline", "disabled"]


class NoArgs(Section):
    """Of a tracker that takes nothing."""


class TensorBoardArgs(Section):
    """`log_dir` None is `tensorboard/` in the run directory."""

    log_dir: str | None = None


class WandbArgs(Section):
    """Of `wandb.init`; `log_dir` None is the run directory, `mode` None goes online only for who is logged in."""

    project: str | None = None
    entity: str | None = None
    name: str | None = None
    notes: str | None = None
    tags: Texts = ()
    group: str | None = None
    log_dir: str | None = None
    api_key: str | None = None
    base_url: str | None = None
    mode: Mode | None = None
    settings: dict[str, Any] | None = None


class SwanlabArgs(Section):
    """Of `swanlab.init`; `login_kwargs` go to `swanlab.login`. `cloud` is ROLL's word for `online`."""

    project: str | None = None
    workspace: str | None = None
    experiment_name: str | None = None
    description: str | None = None
    tags: Texts = ()
    logdir: str | None = None
    mode: Literal["online", "cloud", "local", "offline", "disabled"] | None = None
    login_kwargs: dict[str, Any] | None = None


class MlflowArgs(Section):
    """`tracking_uri` None is MLFLOW_TRACKING_URI, else a SQLite file in the run directory."""

    tracking_uri: str | None = None
    experiment_name: str | None = None
    run_name: str | None = None
    tags: dict[str, str] | None = None


ARGUMENTS: dict[str, type[Section]] = {
    "tensorboard": TensorBoardArgs,
    "wandb": WandbArgs,
    "swanlab": SwanlabArgs,
    "mlflow": MlflowArgs,
    "stdout": NoArgs,
    "jsonl": NoArgs,
}
TRACKERS_OF_ROLL = ("trackio", "ml_tracker")  # and those above
# modules that a tracker needs beyond what every run has; the extra of setup.py has the tracker's name
MODULES = {"wandb": ("wandb",), "swanlab": ("swanlab",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
SECRETS = ("api_key", "token", "password", "secret", "authorization")  # endings of keys


def read_trackers(top: Run, findings: Findings) -> dict[str, dict[str, Any]]:
    """Return the arguments of each tracker in `track_with`, in its order; tell what is wrong with them."""
    names = [name for name in dict.fromkeys(top.track_with) if _known(name, findings)]
    return {name: _check(name, args, key, findings) for name, (args, key) in _by_tracker(names, top, findings).items()}


def _known(name: str, findings: Findings) -> bool:
    if name in ARGUMENTS or _users_own(name):
        return True
    reason = "is not available here" if name in TRACKERS_OF_ROLL else "is not a known tracker"
    findings.problem(
        "track_with",
        f"{name!r} {reason}; use one or more of {', '.join(ARGUMENTS)}, or the dotted path of your own class",
    )
    return False


def _users_own(name: str) -> bool:
    return DOTTED.fullmatch(name) is not None


def _by_tracker(names: list[str], top: Run, findings: Findings) -> dict[str, tuple[dict[str, Any], str]]:
    """Return tracker -> (its arguments, the key under which they are written)."""
    kwargs, found = top.tracker_kwargs, {name: ({}, "tracker_kwargs") for name in names}
    if not kwargs or not names:
        return found
    if all(key in ARGUMENTS or _users_own(key) for key in kwargs):
        for name, args in kwargs.items():
            key = f"tracker_kwargs.{name}"
            if args is not None and not isinstance(args, dict):
                findings.problem(key, f"expected the arguments of tracker {name}, got {args!r}")
            elif name in found:
                found[name] = ({key: value for key, value in (args or {}).items() if value is not None}, key)
            else:
                findings.warn(f"{key} has no effect: track_with does not name {name}")
        return found
    taking = [name for name in names if _users_own(name) or ARGUMENTS[name].model_fields]
    if len(taking) > 1:
        findings.problem(
            "tracker_kwargs",
            f"with several trackers it maps each to its arguments, such as {taking[0]}: {{...}};"
            f" {', '.join(map(repr, kwargs))} could be meant for any of {', '.join(taking)}",
        )
    elif taking:
        found[taking[0]] = ({key: value for key, value in kwargs.items() if value is not None}, "tracker_kwargs")
    else:
        findings.warn(f"tracker_kwargs has no effect: {', '.join(names)} takes no arguments")
    return found


def _check(name: str, args: dict[str, Any], path: str, findings: Findings) -> dict[str, Any]:
    """Return the arguments that were written, checked; those of a user's own class are its own business."""
    if _users_own(name):
        return args
    model = ARGUMENTS[name]
    kept = {}
    for key, value in args.items():
        if key in model.model_fields:
            kept[key] = value
            continue
        near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.5)
        known = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(model.model_fields)}"
        findings.problem(f"{path}.{key}", f"unknown argument of tracker {name}; {known}")
    try:
        return model.model_validate(kept).model_dump(include=set(kept))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            text = str(item["msg"]).removeprefix("Input should be ")
            findings.problem(f"{path}.{item['loc'][0]}", f"should be {text}, got {item['input']!r}")
        return {}


def lacking(names: Iterable[str]) -> list[str]:
    """Return a sentence for each tracker whose packages or module are not installed here."""
    sentences = []
    for name in names:
        modules = (name.partition(".")[0],) if _users_own(name) else MODULES.get(name, ())
        absent = [module for module in modules if sys.modules.get(module) is None and find_spec(module) is None]
        if not absent:
            continue
        remedy = f"run `pip install 'roll_opd[{name}]'`" if name in MODULES else "put it on PYTHONPATH"
        sentences.append(f"track_with: {name} needs {', '.join(absent)}, which is not installed; {remedy}")
    return sentences


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without what opens anyone's account, under any key; it is written and sent away."""
    return _without(values, frozenset(_secrets(values)))


def _is_secret(key: Any) -> bool:
    return str(key).lower().endswith(SECRETS)


def _secrets(value: Any, secret: bool = False) -> Iterator[str]:
    """The texts under secret keys."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, secret or _is_secret(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item, secret)
    elif secret and isinstance(value, str) and value:
        yield value


def _without(value: Any, secrets: frozenset[str]) -> Any:
    def hidden(item: Any) -> bool:
        return isinstance(item, str) and item in secrets

    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if not (_is_secret(key) or hidden(item))}
        return {key: _without(item, secrets) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_without(item, secrets) for item in value if not hidden(item)]
    return value
