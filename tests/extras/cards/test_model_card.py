"""The model card of a trained model, in the form that model hubs read."""

import getpass
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from roll_opd.config.plan import RunPlan
from roll_opd.extras.alarm.remedies import remedies
from roll_opd.extras.cards.model_card import model_card
from roll_opd.extras.cards.origin import base_model, cached, model_name
from roll_opd.pipelines import settings_history
from roll_opd.planner.load_plan import load_plan
from roll_opd.tracking.summary import summarize

MEASURED = [{"step": 0, "val_correct/all/mean": 0.25}, {"step": 20, "val_correct/all/mean": 0.75}]
TAGS = {
    "onpolicy_distill": {"on-policy-distillation", "knowledge-distillation"},
    "rlvr_opd": {"on-policy-distillation", "knowledge-distillation", "reinforcement-learning"},
    "rlvr": {"reinforcement-learning"},
    "sft": {"sft"},
    "dpo": {"dpo"},
}
RATE = "student_train.training_args.learning_rate"


def copy_of_the_student(place: Path, **files: str) -> Path:
    place.mkdir(parents=True)
    for file in Path("examples/demo/models/student").resolve().iterdir():
        (place / file.name).symlink_to(file)
    for name, text in files.items():
        file = place / name.replace("_", ".")
        file.unlink(missing_ok=True)
        file.write_text(text)
    return place


def head_of(card: str) -> dict[str, Any]:
    """Return the front matter, as the hub's library reads it; no value is empty or has an invalid form."""
    data = ModelCard(card).data
    head = yaml.safe_load(card.split("---\n")[1])
    assert data.to_dict() == head and all(value not in (None, "", []) for value in head.values())
    for name in [head.get("base_model"), *head.get("datasets", [])]:
        assert name is None or re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    return head


def parts_of(plans: Sequence[RunPlan], ends: Sequence[int]) -> tuple[settings_history.RunPart, ...]:
    """The parts of a run that was resumed with each of `plans`."""
    now = settings_history.begun(plans[0])
    for plan, step in zip(plans[1:], ends, strict=False):
        saved = json.loads(json.dumps(now.as_json(step)))
        now = settings_history.continued(settings_history.parts_of(saved, step), plan, step)
    return now.up_to(ends[-1])


@pytest.mark.parametrize("name", TAGS)
def test_the_card_of_each_pipeline(name: str) -> None:
    supervised = {"pipeline": name} if name in ("sft", "dpo") else {"pure": name == "onpolicy_distill"}
    plan = load_plan("demo", name, **supervised)
    card = ModelCard(model_card(plan, summarize(MEASURED), 20))
    assert set(card.data.tags) == TAGS[name] | {"roll_opd"}
    assert (card.data.base_model, card.data.pipeline_tag) == (None, "text-generation")
    assert card.data.license is None and card.data.datasets is None
    assert card.data.library_name == "transformers"
    assert f"# {plan.exp_name}, step 20" in card.text and plan.title in card.text
    assert "0.2500    0.7500" in card.text and "from vllm import LLM" in card.text
    assert ("teacher" in card.text.lower()) == bool(plan.teachers)
    assert Path(plan.data.files[0]).name in card.text and str(Path(plan.data.files[0]).parent) not in card.text
    assert all(len(row.split(" | ")) == 2 for row in card.text.splitlines() if row.startswith("| "))


@pytest.mark.parametrize(
    ("readme", "taken"),
    [
        (
            "---\nlicense: mit\nlanguage: [en]\nbase_model: org/base\n---\n# Old\n",
            {"base_model": "org/base"},
        ),
        ("---\nbase_model: /data/models/x\n---\n", {}),
        ("---\nbase_model: [base, org/base]\n---\n", {"base_model": "org/base"}),
        ("---\nbase_model: ../base\n---\n", {}),
        ("---\n: [\n---\n", {}),
        ("# A model without a head\n", {}),
    ],
)
def test_the_base_model_is_that_of_the_students_card(tmp_path: Path, readme: str, taken: dict[str, Any]) -> None:
    base = copy_of_the_student(tmp_path / "base", README_md=readme)
    plan = load_plan("demo", "sft", [f"sft_train.model_args.model_name_or_path={base}"], pipeline="sft")
    card = model_card(plan, summarize([]), 1)
    head = head_of(card)
    assert {key: head[key] for key in head.keys() - {"library_name", "pipeline_tag", "tags"}} == taken
    assert "Old" not in card and str(tmp_path) not in card


def test_the_name_of_a_model() -> None:
    place = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/abc"
    assert model_name(place) == base_model(Path(place)) == "Qwen/Qwen3-8B"
    assert model_name("/data/models/Qwen3-8B/") == "Qwen3-8B" and base_model(Path("/data/models/Qwen3-8B")) is None
    assert cached("/c/hub/datasets--openai--gsm8k/snapshots/a/train.parquet", "datasets") == "openai/gsm8k"
    assert cached(place, "datasets") is None


@pytest.mark.parametrize("name", ["org/model", "student", "/home/me/model", "./model", "examples/demo"])
def test_the_name_in_config_json(tmp_path: Path, name: str) -> None:
    """A name on the hub has an owner and is not a path on this machine."""
    config = json.loads(Path("examples/demo/models/student/config.json").read_text())
    base = copy_of_the_student(tmp_path / "base", config_json=json.dumps(config | {"_name_or_path": name}))
    assert base_model(base) == ("org/model" if name == "org/model" else None)


def test_each_part_of_a_run_has_its_own_settings() -> None:
    plans = [
        load_plan("demo", "onpolicy_distill", overrides)
        for overrides in ([f"{RATE}=1e-5"], [f"{RATE}=3e-6", "seed=3"], [f"{RATE}=1e-6", "seed=3", "opd_kl_coef=0.5"])
    ]
    card = model_card(plans[-1], summarize(MEASURED), 60, parts_of(plans, (30, 45, 60)))
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in card.splitlines() if row.startswith("| ")}
    assert "|  | steps 1 to 30 | steps 31 to 45 | steps 46 to 60 |" in card
    assert rows[f"| `{RATE}`"] == ["1e-05", "3e-06", "1e-06 |"]
    assert rows["| `seed`"] == ["42", "3", "3 |"]
    assert rows["| `opd_kl_coef`"] == ["1", "1", "0.5 |"]
    assert "## Objective of steps 46 to 60" in card
    assert not any("adam_beta1" in row for row in rows)  # the same everywhere, and of no interest
    head_of(card)


def test_a_part_of_unknown_settings() -> None:
    plan = load_plan("demo", "onpolicy_distill")
    now = settings_history.continued((settings_history.RunPart(1, 30, None),), plan, 30)
    card = model_card(plan, summarize([]), 60, now.up_to(60))
    assert f"| `{RATE}` | unknown | 0.0002 |" in card


def test_the_card_has_no_data_of_the_machine(tmp_path: Path) -> None:
    """Over all settings that differ: paths, addresses, variables and keys."""
    student = copy_of_the_student(tmp_path / "secret place" / "my-student")
    rows = tmp_path / "secret place" / "rows.jsonl"
    rows.write_text(Path("examples/demo/data/val.jsonl").read_text())
    plans = [
        load_plan("demo", "rlvr_opd"),
        load_plan(
            "demo",
            "rlvr_opd",
            [
                f"actor_train.model_args.model_name_or_path='{student}'",
                f"actor_infer.model_args.model_name_or_path='{student}'",
                f"validation.data_args.file_name='{rows}'",
                f"++system_envs={{HF_TOKEN: hf_private, CACHE: '{tmp_path}/cache', PROXY: 'http://me:pw@proxy.corp:80'}}",
            ],
        ),
    ]
    card = model_card(plans[-1], summarize([]), 60, parts_of(plans, (30, 60)))
    private = (
        "secret place",
        str(tmp_path),
        "/home",
        "/root",
        "/tmp",
        "/work",
        socket.gethostname(),
        "hf_private",
        "proxy",
    )
    assert [text for text in (*private, f"/{getpass.getuser()}/", "system_envs") if text in card] == []
    assert "my-student" in card and "rows.jsonl" in card
    head_of(card)


def test_the_card_of_a_run_in_environments() -> None:
    """Its environments, and keys and values as the YAML file has them; those of a resumed run, too."""
    plans = [load_plan("examples/games", "frozen_lake", words) for words in ([], ["sequence_length=400"])]
    card = model_card(plans[0], summarize([]), 1, parts_of(plans[:1], [1]))
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in card.splitlines() if row.startswith("| ")}
    assert rows["| environment `FrozenLake`"] == ["`frozen_lake`, at most 8 turns |"] and "| data" not in rows
    assert rows["| `rollout_batch_size`"] == ["128 |"] and rows["| `train_env_manager.group_size`"] == ["2 |"]
    assert rows["| `sequence_length`"] == ["320 |"] and "of 128 trajectories" in card
    assert "response_length" not in card and "num_return_sequences_in_group" not in card
    assert "|  | step 1 |" in card
    now = settings_history.continued(
        settings_history.parts_of(json.loads(json.dumps(settings_history.begun(plans[0]).as_json(3))), 3), plans[1], 3
    )
    assert now.line == "Settings changed after step 3: sequence_length: 320 → 400"
    assert "|  | steps 1 to 3 | step 4 |" in model_card(plans[1], summarize([]), 4, now.up_to(4))


def test_the_card_has_no_address_of_a_teacher_without_devices() -> None:
    plan = load_plan("demo", "onpolicy_distill", [], pure=True)
    source: Any = SimpleNamespace(name="teacher", location="http://teacher.example:8000")
    plan = replace(plan, teachers=(replace(plan.teachers[0], source=source),))
    card = model_card(plan, {}, 1, settings_history.begun(plan).parts)
    assert "teacher `teacher`" in card and "example" not in card.partition("## Settings")[0]
    remedies(plan)


def test_a_card_has_no_prompt_of_the_data() -> None:
    assert 'prompt = "Hello"' in model_card(load_plan("demo", "rlvr_opd", []), summarize([]), 1)
