"""The pages of docs/rewards on rules: their YAML is a valid section, and their rows get the stated scores."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_opd.data.row_formats import parse_row
from roll_opd.rewards.interface import RewardSample, read_scores
from roll_opd.rewards.reward_registry import resolve, reward_arguments

PAGES = Path(__file__).parents[3] / "docs" / "rewards"
SECTION_KEYS = {"worker_cls", "tag_included", "weight", "terms"}
# page -> the worker that scores its rows; another worker in its YAML has a page of its own
SCORED_BY = {
    "ifeval.md": "ifeval",
    "multiple_choice.md": "multiple_choice",
    "crossthinkqa.md": "crossthinkqa",
    "general_rule.md": "general_rule",
    "terms.md": "format",
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


def table_keys(page: str) -> set[str]:
    """The keys of the tables `| key | default | meaning |`."""
    text = (PAGES / page).read_text(encoding="utf-8")
    tables = re.findall(r"\| key \| default \| meaning \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    return {key for table in tables for key in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)}


def sections(page: str) -> dict[str, dict[str, Any]]:
    """Worker -> its arguments, from the page's YAML; a term is named after its worker."""
    (block,) = blocks(page, "yaml")
    (section,) = yaml.safe_load(block)["rewards"].values()
    found = {section["worker_cls"]: section, **section.get("terms", {})}
    return {
        name: {key: value for key, value in keys.items() if key not in SECTION_KEYS} for name, keys in found.items()
    }


@pytest.mark.parametrize("page", SCORED_BY)
def test_a_page_is_true(page: str) -> None:
    workers = sections(page)
    for name, arguments in workers.items():
        assert arguments.keys() <= reward_arguments(name).keys()
    described = [name for name in workers if not (PAGES / f"{name}.md").exists() or f"{name}.md" == page]
    assert table_keys(page) == set().union(*map(reward_arguments, described))
    reward = resolve(SCORED_BY[page], workers[SCORED_BY[page]])
    rows = {row["id"]: parse_row(row, "") for row in map(json.loads, "".join(blocks(page, "json")).splitlines())}
    text = (PAGES / page).read_text(encoding="utf-8")
    cases = re.findall(r"^\| (\d) \| `(.*)` \| (\S+) \|$", text, re.MULTILINE)
    assert {row for row, _, _ in cases} == set(rows)
    for name, response, value in cases:
        row = rows[name]
        samples = [RewardSample(row.id, response.replace(r"\n", "\n"), row.ground_truth, row.tag, row.extra)]
        (score,) = read_scores(reward(samples), samples, page)
        assert score.value == float(value), (name, response)
