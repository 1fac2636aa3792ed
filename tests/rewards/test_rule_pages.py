"""The pages of docs/rewards on rules: their YAML is a section that works, and their rows are scored as they say."""

import json
import re
from pathlib import Path

import pytest
import yaml

from roll_opd.config.known_names import REWARD_WORKERS
from roll_opd.data.rows import parse_row
from roll_opd.rewards.interface import RewardSample, read_scores
from roll_opd.rewards.registry import resolve

PAGES = Path(__file__).parents[2] / "docs" / "rewards"
SECTION_KEYS = {"worker_cls", "tag_included"}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


def table_keys(page: str) -> set[str]:
    """The keys of the tables `| key | default | meaning |`."""
    text = (PAGES / page).read_text(encoding="utf-8")
    tables = re.findall(r"\| key \| default \| meaning \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    return {key for table in tables for key in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)}


@pytest.mark.parametrize("page", ["ifeval.md", "multiple_choice.md", "crossthinkqa.md", "general_rule.md", "terms.md"])
def test_a_page_is_true(page: str) -> None:
    workers = {}
    for block in blocks(page, "yaml"):
        (section,) = yaml.safe_load(block)["rewards"].values()
        arguments = {key: value for key, value in section.items() if key not in SECTION_KEYS}
        assert arguments.keys() <= REWARD_WORKERS[section["worker_cls"]]
        workers[section["worker_cls"]] = resolve(section["worker_cls"], arguments)
    assert table_keys(page) == set().union(*(REWARD_WORKERS[name] for name in workers))
    first = next(iter(workers.values()))
    rows = {row["id"]: parse_row(row, "") for row in map(json.loads, "".join(blocks(page, "json")).splitlines())}
    text = (PAGES / page).read_text(encoding="utf-8")
    cases = re.findall(r"^\| (\d) \| `(.*)` \| (\S+) \|$", text, re.MULTILINE)
    assert {row for row, _, _ in cases} == set(rows)
    for name, response, value in cases:
        row = rows[name]
        samples = [RewardSample(row.id, response.replace(r"\n", "\n"), row.ground_truth, row.tag, row.extra)]
        (score,) = read_scores(first(samples), samples, page)
        assert score.value == float(value), (name, response)
