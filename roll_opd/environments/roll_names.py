"""Names of environments in ROLL's configurations: which is which here, and what those need that are not here."""

from roll_opd.environments.interface import EnvironmentFailure

# class at the end of a path below roll.pipeline.agentic.env -> name here
CLASSES = {"FrozenLakeEnv": "frozen_lake", "SokobanEnv": "sokoban", "MathEnv": "roll_math"}
SERVED = "or serve it from a process that has it, and name it here by `env_type: http` and its url"
ROCK = f"needs a ROCK server, which starts containers for its episodes; use an environment of this package, {SERVED}"
# env_type -> what it needs
NEEDS = {
    "webshop": (
        "needs the package webshop-minimal of ROLL's third_party/ and its data of products;"
        f" use search_shop, a small shop without data, {SERVED}"
    ),
    "roll_qa": (
        "needs a data set of questions and, for its tool, a retrieval server over an encyclopedia;"
        f" write an environment of your own, {SERVED}"
    ),
    "roll_code": (
        "needs GEM's runner of programs; use the reward code_sandbox, which judges programs by the test cases of a row,"
        f" {SERVED}"
    ),
    "deepeyes": f"needs a vision-language model and its images; use an environment of texts, {SERVED}",
    "sokoban_mcp": f"needs an MCP server that plays the game; use sokoban, {SERVED}",
    "sokoban_sandbox": ROCK,
    "rock_tb_native_env": ROCK,
    "sokoban_native_env": f"needs ROLL's own agent loop, which plays with lists of messages; use sokoban, {SERVED}",
    "sokoban_tool_call": f"needs ROLL's own agent loop, which answers calls of tools; use sokoban, {SERVED}",
    "openreward_env": f"needs the package openreward and its service; use an environment of this package, {SERVED}",
    "atropos_env": f"needs the package atroposlib and its API server; use an environment of this package, {SERVED}",
}


def name_of_roll(path: str) -> str:
    """Return the name here of a class path of ROLL's; `EnvironmentFailure` where it has no counterpart."""
    name = CLASSES.get(path.replace(":", ".").rpartition(".")[2])
    if name is None:
        raise EnvironmentFailure(
            f"env_type {path} has no counterpart here; known are the classes {', '.join(CLASSES)} of ROLL's, or give a"
            " dotted path of your own"
        )
    return name
