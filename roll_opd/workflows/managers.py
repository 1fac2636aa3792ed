"""Which of ROLL's environment managers makes what: a sample of each action, or of a whole conversation."""

STEP_WISE = "Step"  # in the name of the first kind's classes


def makes_steps(env_manager_cls: str | None) -> bool:
    """Whether a manager, by the path of its class, makes a sample of each action; None: ROLL's default, which does not.

    So do StepEnvManager, StepConcatEnvManager and AgentNativeStepEnvManager.
    """
    return STEP_WISE in (env_manager_cls or "").rpartition(".")[2]
