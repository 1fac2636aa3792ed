"""Advice on names of Trinity-RFT 0.6.0 that do not exist here."""

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
_UNSUPPORTED = {
    "WorkflowBase": "derive from Workflow, or from WorkflowWithRecording for an agent that uses an OpenAI endpoint",
    "Status": "return a list of experiences; a WorkflowWithRecording returns a dict of metrics",
    "CustomField": "no loss reads custom fields; put values to log into Experience.metrics",
    "RMGalleryFn": "write a RewardFn, or add a reward to the configuration (docs/rewards)",
}


def advice(name: str) -> str | None:
    """Return advice on a workflow or class of Trinity-RFT that does not exist here. For any other name, return None."""
    if name in _UNSUPPORTED:
        return f"{name} of Trinity-RFT does not exist here: {_UNSUPPORTED[name]}"
    module, kind = _PLACES.get(name) or next((place for place in _PLACES.values() if place[1] == name), ("", ""))
    if not module:
        return None
    file = f"trinity/common/workflows/{module.replace('.', '/')}.py"
    return (
        f"{name} is part of Trinity-RFT and not of this package; copy {file} and its imports into"
        f" plugin_dir, change its imports to roll_opd.workflows, and write workflow={module.rpartition('.')[2]}.{kind}"
    )
