"""ROLL's environment names: their counterparts here, and the requirements of unsupported ones."""

from roll_opd.environments.interface import EnvironmentFailure

# class at the end of a path below roll.pipeline.agentic.env -> name here
CLASSES = {"FrozenLakeEnv": "frozen_lake", "SokobanEnv": "sokoban", "MathEnv": "roll_math"}
SERVED = "or serve it from a process that has it, and set `env_type: http` with its url"
ROCK = f"needs a ROCK server, which starts containers for its episodes; use an environment of this package, {SERVED}"
# unsupported env_type -> its requirement and an alternative
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
    "deepeyes": f"needs a vision-language model and its images; use a text environment, {SERVED}",
    "sokoban_mcp": f"needs an MCP server that plays the game; use sokoban, {SERVED}",
    "sokoban_sandbox": ROCK,
    "rock_tb_native_env": ROCK,
    "sokoban_native_env": f"needs ROLL's own agent loop, which uses lists of messages; use sokoban, {SERVED}",
    "sokoban_tool_call": f"needs ROLL's own agent loop, which executes tool calls; use sokoban, {SERVED}",
    "openreward_env": f"needs the package openreward and its service; use an environment of this package, {SERVED}",
    "atropos_env": f"needs the package atroposlib and its API server; use an environment of this package, {SERVED}",
}


def name_of_roll(path: str) -> str:
    """Return the name here for a class path of ROLL's; raises `EnvironmentFailure` without a counterpart."""
    name = CLASSES.get(path.replace(":", ".").rpartition(".")[2])
    if name is None:
        raise EnvironmentFailure(
            f"env_type {path} has no counterpart here; use one of ROLL's classes {', '.join(CLASSES)}, or a dotted path"
            " to your class"
        )
    return name
