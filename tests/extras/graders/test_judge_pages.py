"""The pages of llm_judge and remote: their section and row are valid, and their tables name every key."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted_server import ScriptedServer, scored

from roll_opd.data.row_formats import parse_row
from roll_opd.extras.graders.judge_prompts import JUDGE_PROMPTS, check_template, filled
from roll_opd.extras.graders.rewards.llm_judge import LLMJudge
from roll_opd.rewards.builtin.remote import Remote, as_json, read_rewards
from roll_opd.rewards.interface import RewardSample, Score
from roll_opd.rewards.reward_registry import reward_arguments

PAGES = Path(__file__).parents[3] / "docs" / "rewards"
SECTION_KEYS = {"worker_cls", "tag_included"}


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (PAGES / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL)


def section_and_sample(name: str) -> tuple[dict[str, Any], RewardSample]:
    [section] = yaml.safe_load(blocks(name, "yaml")[0])["rewards"].values()
    assert section.pop("worker_cls") == name
    row = parse_row(json.loads(blocks(name, "json")[0]), "none")
    assert section.pop("tag_included") == [row.tag]
    assert set(section) <= set(reward_arguments(name))
    question = row.messages[0]["content"]
    return section, RewardSample(
        row.id, "It is so.", row.ground_truth, row.tag, row.extra, read_prompt=lambda: question
    )


@pytest.mark.parametrize("name", ["llm_judge", "remote"])
def test_the_table_has_every_key_with_its_default(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text().partition("\n## ")[0]
    written = {}
    for keys, default in re.findall(r"^\| (`[^|]*`) \| ([^|]*)\|", text, re.MULTILINE):
        names, values = re.findall(r"`(\w+)`", keys), default.strip().strip("`").split(", ")
        written.update(zip(names, values * len(names) if len(values) == 1 else values, strict=False))
    parameters = reward_arguments(name)
    assert set(written) == set(parameters)
    of_the_prompt = {"judge_prompt", "verdict", "verdict_key", "pattern", "min_score", "max_score"}
    for key in set(written) - of_the_prompt:
        default = parameters[key].default
        assert written[key] == ("" if default is None else str(default)), key


def test_the_judges_section_and_row(serve: Callable[..., ScriptedServer]) -> None:
    section, sample = section_and_sample("llm_judge")
    server = serve(lambda body: {"choices": [{"message": {"content": "YES"}}]})
    assert scored(LLMJudge(**{**section, "judge_api_url": server.url}), [sample]) == [Score(1.0)]
    [body] = server.bodies
    assert body["model"] == section["judge_model_name"]
    assert (
        sample.prompt in body["messages"][0]["content"] and str(sample.ground_truth) in body["messages"][0]["content"]
    )


def test_the_judges_prompts() -> None:
    text = (PAGES / "llm_judge.md").read_text().partition("## The prompt")[2]
    table = re.findall(r"^\| `(\S+)` \| (?:`(\S+)`)? ?\|", text, re.MULTILINE)
    assert {name for names in table for name in names if name} == set(JUDGE_PROMPTS)
    [template] = blocks("llm_judge", "text")
    check_template(template, "the page")
    asked = filled(template, RewardSample("a", "answer", None, "t", {"rubric": "short"}, read_prompt=lambda: "q"))
    assert asked is not None and asked.endswith('{"reasons": "...", "score": 0}\n')


def test_the_remotes_section_row_request_and_answer(serve: Callable[..., ScriptedServer]) -> None:
    section, sample = section_and_sample("remote")
    _, request, answer = map(json.loads, blocks("remote", "json"))
    server = serve(lambda body: answer)
    expected = Score(0.8, {"form": 1.0}, "too short")
    assert scored(Remote(**{**section, "url": server.url}), [sample]) == [expected]
    [reported] = request["samples"]
    assert set(reported) == set(as_json(sample)) == set(server.bodies[0]["samples"][0])
    assert {key: reported[key] for key in ("prompt", "tag", "extra")} == {
        key: server.bodies[0]["samples"][0][key] for key in ("prompt", "tag", "extra")
    }
    assert read_rewards(answer["rewards"], 1) == [expected]
