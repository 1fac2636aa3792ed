"""The card of a trained model: of the new model, as model hubs read it."""

from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from roll_opd.config.build import load_plan
from roll_opd.pipelines.model_card import model_card, model_name
from roll_opd.tracking.summary import summarize

MEASURED = [{"step": 0, "val_correct/all/mean": 0.25}, {"step": 20, "val_correct/all/mean": 0.75}]
TAGS = {
    "onpolicy_distill": {"on-policy-distillation", "knowledge-distillation"},
    "rlvr_opd": {"on-policy-distillation", "knowledge-distillation", "reinforcement-learning"},
    "rlvr": {"reinforcement-learning"},
    "sft": {"sft"},
    "dpo": {"dpo"},
}


@pytest.mark.parametrize("name", TAGS)
def test_the_card_of_each_pipeline(name: str) -> None:
    supervised = {"pipeline": name} if name in ("sft", "dpo") else {"pure": name == "onpolicy_distill"}
    plan = load_plan("demo", name, **supervised)
    card = ModelCard(model_card(plan, summarize(MEASURED), 20))
    assert set(card.data.tags) == TAGS[name] | {"roll_opd"}
    assert (card.data.base_model, card.data.pipeline_tag) == ("student", "text-generation")
    assert card.data.library_name == "transformers"
    assert f"# {plan.exp_name}, step 20" in card.text and plan.title in card.text
    assert "0.2500    0.7500" in card.text and "from vllm import LLM" in card.text
    assert ("teacher" in card.text.lower()) == bool(plan.teachers)
    assert Path(plan.data.files[0]).name in card.text and str(Path(plan.data.files[0]).parent) not in card.text
    assert all(len(row.split(" | ")) == 2 for row in card.text.splitlines() if row.startswith("| "))


def test_the_licence_of_the_base_goes_along(tmp_path: Path) -> None:
    cards = {"licensed": "---\nlicense: mit\nlanguage: [en]\nbase_model: other\n---\n# Old\n", "odd": "---\n: [\n---\n"}
    for name, text in cards.items():
        base = tmp_path / name
        base.mkdir()
        for file in Path("examples/demo/models/student").resolve().iterdir():
            (base / file.name).symlink_to(file)
        (base / "README.md").write_text(text)
        plan = load_plan("demo", "sft", [f"sft_train.model_args.model_name_or_path={base}"], pipeline="sft")
        head = yaml.safe_load(model_card(plan, summarize([]), 1).split("---\n")[1])
        taken = {key: head[key] for key in ("license", "language") if key in head}
        assert taken == ({"license": "mit", "language": ["en"]} if name == "licensed" else {})
        assert head["base_model"] == name and "Old" not in model_card(plan, summarize([]), 1)


def test_the_name_of_a_model() -> None:
    cached = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/abc"
    assert model_name(cached) == "Qwen/Qwen3-8B"
    assert model_name("/data/models/Qwen3-8B/") == "Qwen3-8B"
