"""ROLL's environment managers: one sample per action or one per conversation, selected by class path."""

from roll_opd.base.hints import nearest

STEP_WISE = ("StepEnvManager", "StepConcatEnvManager", "AgentNativeStepEnvManager")  # one sample per action
CONVERSATION = "TrajEnvManager"  # ROLL's default
TYPO_SIMILARITY = 0.9  # high, because all managers' names share a suffix
PACKAGE = "roll.pipeline.agentic.env_manager"


def makes_steps(env_manager_cls: str | None) -> bool:
    """Return whether the manager with this class path makes one sample per action; ROLL's default does not."""
    return _class_of(env_manager_cls) in STEP_WISE


def manager_problem(env_manager_cls: str | None) -> str | None:
    """Return the problem of a manager's class path; None for a supported manager of ROLL's."""
    if env_manager_cls is None:
        return None
    name, known = _class_of(env_manager_cls), (CONVERSATION, *STEP_WISE)
    of_roll = env_manager_cls == name or env_manager_cls.startswith("roll.")
    if of_roll and name in known:
        return None
    near = nearest(name, known, at_least=TYPO_SIMILARITY)
    hint = f"did you mean {near!r}?" if near and near != name else "remove the key, or write a supported one."
    return (
        f"{env_manager_cls} is not a supported manager of ROLL's, and custom managers are not supported; {hint}"
        f" Supported in {PACKAGE}: {', '.join(known)}"
    )


def _class_of(env_manager_cls: str | None) -> str:
    return (env_manager_cls or CONVERSATION).rpartition(".")[2]
