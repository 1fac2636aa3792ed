"""The section `demonstrations`: demonstrations, and how many of them join the student's samples in an update."""

from dataclasses import replace

from roll_opd.config.algorithms import LOSSES, LossFacts
from roll_opd.config.errors import Findings
from roll_opd.config.interleaving import read_streams
from roll_opd.config.plan import DataPlan
from roll_opd.config.prompt_files import tags_in
from roll_opd.config.schema import Top
from roll_opd.config.surroundings import answer_columns, read_data

SECTION = "demonstrations"
TOLERANCE = 0.05  # of a row: thirds may be written as 0.333


def expert_rows(mini_batch: int, share: float) -> int:
    """Return how many of the sequences of an update an expert wrote."""
    return round(mini_batch * share)


def check_share(mini_batch: int, share: float, arithmetic: str, findings: Findings) -> bool:
    """Check that `share` of a mini-batch is a whole number of rows, and neither none nor all; say so if not.

    `arithmetic` says where `mini_batch` comes from.
    """
    rows = expert_rows(mini_batch, share)
    if not share or (abs(mini_batch * share - rows) <= TOLERANCE and 0 < rows < mini_batch):
        return True
    findings.problem(
        "expert_data_ratio",
        f"{share:g} of a mini-batch of {mini_batch} sequences ({arithmetic}) is {mini_batch * share:g} rows of an"
        " expert's; change one of them, so that whole rows of both an expert and the student are in it",
    )
    return False


def read_expert(top: Top, length: int, agentic: bool, findings: Findings) -> DataPlan | None:
    """Return where the rows come from, None where there are none; `length` is the most tokens of prompt and answer."""
    loss, share, path = top.policy_loss or "ppo", top.expert_data_ratio, f"{SECTION}.data_args"
    if top.demonstrations is None:
        if share:
            findings.problem(
                SECTION,
                f"is missing; policy loss {loss} learns a share of each batch (expert_data_ratio {share:g}) from rows"
                f" with answers; write {path}.file_name",
            )
        return None
    if not share:
        if LOSSES.get(loss, LossFacts()).needs != "demonstrations":  # else the share is what is wrong, and told so
            findings.problem(
                SECTION,
                f"is written, but policy loss {loss} learns nothing from it; use algorithm_type mix or mix_chord, or"
                " remove the section",
            )
        return None
    if agentic:
        findings.block(SECTION, "joins the answers to prompts, not yet the trajectories of environments; remove it")
        return None
    data = read_data(top.demonstrations.data_args, path, top, length, findings)
    if data is None:
        return None
    columns = answer_columns(data, top.demonstrations)
    data = replace(data, schema="sft", columns=columns, length_key="prompt_length + response_length")
    if not tags_in(data)[0]:
        findings.problem(f"{path}.file_name", f"no row can be read in {', '.join(data.files)}; give rows with answers")
        return None
    return replace(data, streams=read_streams(top.demonstrations.data_args, path, data, (), findings))
