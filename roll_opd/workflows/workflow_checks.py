"""Check the name and the arguments of a configured workflow, and give advice on workflows of Trinity-RFT 0.6.0."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_opd.base.entry_points import entries
from roll_opd.base.failures import nearest
from roll_opd.base.registry import Declared, declarations, of_entry

# name -> module below trinity.common.workflows, class
_TRINITY_WORKFLOWS = """
RAFT_alfworld_workflow envs.alfworld.RAFT_alfworld_workflow RAFTAlfworldWorkflow
RAFT_reflect_alfworld_workflow envs.alfworld.RAFT_reflect_alfworld_workflow RAFTReflectAlfworldWorkflow
agentscope_react_math_workflow envs.agentscope.agentscopev1_react_workflow AgentScopeReactMathWorkflow
agentscope_react_workflow agentscope.react.react_workflow AgentScopeReActWorkflow
agentscope_v1_react_search_workflow envs.agentscope.agentscopev1_search_workflow AgentScopeV1ReactSearchWorkflow
agentscope_workflow_adapter agentscope_workflow AgentScopeWorkflowAdapter
agentscope_workflow_adapter_v1 agentscope_workflow AgentScopeWorkflowAdapterV1
agentscopev0_react_math_workflow envs.agentscope.agentscopev0_react_workflow AgentScopeV0ReactMathWorkflow
alfworld_workflow envs.alfworld.alfworld_workflow AlfworldWorkflow
as_react_workflow agentscope.react.react_workflow AgentScopeReActWorkflow
async_math_eval_workflow eval_workflow AsyncMathEvalWorkflow
async_math_rm_workflow math_rm_workflow AsyncMathRMWorkflow
async_math_ruler_workflow math_ruler_workflow AsyncMathRULERWorkflow
async_simple_mm_workflow simple_mm_workflow AsyncSimpleMMWorkflow
email_search_workflow envs.email_searcher.workflow EmailSearchWorkflow
frozen_lake_workflow envs.frozen_lake.workflow FrozenLakeWorkflow
intercode_sql_workflow envs.intercode_sql.intercode_sql_workflow InterCodeSQLWorkflow
math_eval_workflow eval_workflow MathEvalWorkflow
math_rm_workflow math_rm_workflow MathRMWorkflow
math_ruler_workflow math_ruler_workflow MathRULERWorkflow
math_trainable_ruler_workflow math_trainable_ruler_workflow MathTrainableRULERWorkflow
rubric_judge_openai_workflow rubric_judge_workflow RubricJudgeWorkflowWithAPI
rubric_judge_workflow rubric_judge_workflow RubricJudgeWorkflow
sciworld_workflow envs.sciworld.sciworld_workflow SciWorldWorkflow
simple_mm_workflow simple_mm_workflow SimpleMMWorkflow
step_wise_alfworld_workflow envs.alfworld.alfworld_workflow StepWiseAlfworldWorkflow
sudoku_workflow envs.sudoku.sudoku_workflow SudokuWorkflow
tool_call_workflow customized_toolcall_workflows ToolCallWorkflow
webshop_workflow envs.webshop.webshop_workflow WebShopWorkflow
"""
_PLACES = {
    name: (module, kind) for name, module, kind in (line.split() for line in _TRINITY_WORKFLOWS.split("\n") if line)
}


def declared_workflows(of: str = "WORKFLOWS") -> Mapping[str, Declared]:
    """Return the workflows of the package by name, without importing torch. `of` may also be "REWARD_FUNCTIONS"."""
    decorator = f"{of}.register_module"
    elsewhere = {name: of_entry(entry, decorator) for name, entry in entries(of.lower()).items()}
    return {**declarations("roll_opd.workflows.builtin", decorator), **elsewhere}


def advice(name: str) -> str | None:
    """Return advice on how to use a workflow of Trinity-RFT in this package. For any other name, return None."""
    if name not in _PLACES:
        return None
    return _advice(name, *_PLACES[name])


def place_of_class(kind: str) -> str | None:
    """Return advice on how to use a workflow class of Trinity-RFT in this package. For any other class, return None."""
    module = next((module for module, known in _PLACES.values() if known == kind), None)
    return _advice(kind, module, kind) if module else None


def _advice(name: str, module: str, kind: str) -> str:
    file = f"trinity/common/workflows/{module.replace('.', '/')}.py"
    return (
        f"{name} is part of Trinity-RFT and not of this package; copy {file} and its imports into"
        f" plugin_dir, change its imports to roll_opd.workflows, and write workflow={module.rpartition('.')[2]}.{kind}"
    )


def is_written_in(name: str, directory: str) -> bool:
    """Return whether a module of a plugin directory contains `name` in quotes.

    Code that registers a class as `name` contains it in quotes.
    """
    quoted = re.compile(f"[\"']{re.escape(name)}[\"']")
    try:
        files = [file.read_text(encoding="utf-8", errors="replace") for file in Path(directory).glob("[!.]*.py")]
    except OSError:
        return True  # reported when the plugins are imported
    return any(quoted.search(text) for text in files)


BOXED = ("math_boxed_workflow", "async_math_boxed_workflow")


def name_problem(name: str, plugin_dir: str | None) -> str | None:
    """Return the problem of a workflow's name, or None.

    The name has a problem if only Trinity-RFT has such a workflow and no module in `plugin_dir` registers it.
    """
    if name in declared_workflows() or (plugin_dir and is_written_in(name, plugin_dir)):
        return None
    return advice(name)


def argument_problems(name: str, given: Mapping[str, Any], reward: str | None) -> Iterator[tuple[str, str]]:
    """Yield (argument, problem) for each wrong argument of a built-in workflow.

    Args:
        name: name of the workflow.
        given: arguments in the configuration.
        reward: name of the workflow's reward function, or None.
    """
    declared = declared_workflows().get(name)
    if declared is None:
        return
    known = (declared.facts or {}).get("arguments", ())
    for argument in given:
        if argument in known:
            continue
        near = nearest(argument, known)
        others = f"known are {', '.join(known)}" if known else f"{name} has none; remove it"
        yield argument, f"unknown argument of {name}; " + (f"did you mean {near!r}?" if near else others)
    if name in BOXED and reward is None and "format_score_coef" in given:
        yield "format_score_coef", "is read by a reward function; write workflow_reward: math_boxed_reward"
