"""On-policy distillation of large language models: Megatron trains and scores, vLLM samples, Ray runs the processes.

    import roll_opd
    result = roll_opd.run("run.yaml", overrides=["max_steps=20"])

Importing this package does not import torch or an engine, and does not patch anything.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["RunFailed", "__version__", "open", "run"]

if TYPE_CHECKING:
    from roll_opd.api import open_session as open
    from roll_opd.commands.python_api import RunFailed, run
else:

    def __getattr__(name):
        """Import the API when it is first used, because every process of a run imports this package."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "open":
            from roll_opd.api import open_session

            return open_session
        from roll_opd.commands import python_api

        return getattr(python_api, name)


FORMER_MODULES = {  # module name in 0.1 -> name now; both can be imported until 0.3
    "roll_opd.data.prompts": "roll_opd.data.dataset",
    "roll_opd.frozen": "roll_opd.base.frozen",
    "roll_opd.plan": "roll_opd.config.plan",
    "roll_opd.tracking.collapse": "roll_opd.tracking.divergence_alarm",
}
FORMER_NAMES = {"roll_opd.tracking.collapse": {"CollapseAlarm": "DivergenceAlarm"}}


class _FormerModules:
    """Finds and loads modules under their names of version 0.1, because users' scripts import these names."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> "ModuleSpec | None":  # 3.6 evaluates it
        return ModuleSpec(name, _FormerModules) if name in FORMER_MODULES else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        import warnings

        name = module.__name__
        now = import_module(FORMER_MODULES[name])
        former = {old: getattr(now, new) for old, new in FORMER_NAMES.get(name, {}).items()}
        module.__dict__.update({key: value for key, value in vars(now).items() if key[:2] != "__"}, **former)
        warnings.warn(
            f"{name} is now {now.__name__}; the former name will be removed in 0.3", FutureWarning, stacklevel=2
        )


sys.meta_path.append(_FormerModules)
