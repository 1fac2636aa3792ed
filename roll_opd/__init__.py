"""On-policy distillation of large language models: Megatron trains and scores, vLLM samples, Ray runs the processes.

    import roll_opd
    result = roll_opd.run("run.yaml", overrides=["max_steps=20"])

Importing this package does not import torch or an engine, and does not patch anything.
"""

from typing import TYPE_CHECKING

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
