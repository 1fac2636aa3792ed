"""Which of ROLL's environment managers makes what: a sample of each action, or of a whole conversation."""

from roll_opd.base.hints import nearest

STEP_WISE = ("StepEnvManager", "StepConcatEnvManager", "AgentNativeStepEnvManager")  # classes of the first kind
WHOLE = "TrajEnvManager"  # ROLL's default
ALL_BUT_A_LETTER = 0.9  # all managers' names end alike, so that any other one resembles them
PACKAGE = "roll.pipeline.agentic.env_manager"


def makes_steps(env_manager_cls: str | None) -> bool:
    """Whether a manager, by the path of its class, makes a sample of each action; None: ROLL's default, a whole one."""
    return _class_of(env_manager_cls) in STEP_WISE


def manager_problem(env_manager_cls: str | None) -> str | None:
    """Say what is wrong with the path of a manager's class, None where it is one of ROLL's that is played here."""
    if env_manager_cls is None:
        return None
    name, known = _class_of(env_manager_cls), (WHOLE, *STEP_WISE)
    of_roll = env_manager_cls == name or env_manager_cls.startswith("roll.")
    if of_roll and name in known:
        return None
    near = nearest(name, known, at_least=ALL_BUT_A_LETTER)
    hint = f"did you mean {near!r}?" if near and near != name else "leave the key out, or write one of ROLL's."
    return (
        f"{env_manager_cls} is none of ROLL's managers that are played here, and those of your own are not; {hint}"
        f" Known below {PACKAGE}: {', '.join(known)}"
    )


def _class_of(env_manager_cls: str | None) -> str:
    return (env_manager_cls or WHOLE).rpartition(".")[2]
