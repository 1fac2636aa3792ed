"""Teachers with a longer prompt than the student: their log-probs of its responses against Hugging Face, and cases in
which the prompts are equal.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from runs import REPOSITORY, Run
from safetensors.torch import load_file
from stage import PURE, SHORT, WITH_REWARD, Stage, frozen, optimizer_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.cover import tiered

MODELS = REPOSITORY / "examples/demo/models"
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # relative, too: some are -15, where 1e-5 is below the resolution of f32
HINT = '++teacher.hint="({ground_truth})"'


def pure(stage: Stage, *overrides: str) -> Run:
    run = stage.run(*SHORT, *optimizer_of("student_train"), "max_steps=2", *overrides, config=PURE)
    assert run.code == 0
    return run


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.path / "checkpoints/step_2/hf/model.safetensors")


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32) for name in MODEL_NAMES}


MODEL_NAMES = ("student", "teacher")


@torch.no_grad()
def table(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """[R, V]: the distribution of each response token, behind a prompt that is written out."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def sampled(logprobs: torch.Tensor, response: list[int]) -> np.ndarray:
    return np.array([float(row[token]) for row, token in zip(logprobs, response, strict=True)])


@pytest.mark.parametrize(
    "by",
    [(), pytest.param(("workflow=on_policy_distill_workflow", "prompt_key=messages"), marks=pytest.mark.nightly)],
)
def test_log_probs_are_of_the_response_behind_the_teachers_own_prompt(stage: Stage, models: dict, by: tuple) -> None:
    """The teacher is tensor-parallel; every sample of two steps, the second by a student that has learned."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "teacher")
    system = '++teacher.system_prompt="add"'
    rows = pure(stage, HINT, system, "deterministic=false", *by).rows("samples.jsonl")
    assert len(rows) == 2 * 64
    for row in rows:
        question = row["prompt"].removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")
        asked = f"<|system|>add<|end|><|user|>{question}\n\n({row['ground_truth']})<|end|><|assistant|>"
        assert row["teacher_prompts"] == {"teacher": asked}
        response = row["tokens"][row["prompt_length"] :]
        naive = sampled(table(models["teacher"], tokenizer(asked)["input_ids"], response), response)
        np.testing.assert_allclose(row["teacher_logprobs"]["teacher"], naive, **CLOSE)
    assert (
        np.abs(
            naive - sampled(table(models["teacher"], row["tokens"][: row["prompt_length"]], response), response)
        ).max()
        > 0.01
    )


OBJECTIVES = {
    "full": ("opd_objective=full", "opd_divergence=forward_kl"),
    "topk": ("opd_objective=topk", "opd_topk=8", "opd_divergence=forward_kl"),
    "the student's topk": ("opd_objective=topk", "opd_topk=8", "opd_topk_source=student"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("objective", tiered(OBJECTIVES, ["the student's topk"]))
def test_divergences_are_taken_token_by_token_of_the_response(stage: Stage, models: dict, objective: str) -> None:
    run = pure(stage, HINT, *OBJECTIVES[objective])
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "teacher")
    total, count = 0.0, 0
    for row in (row for row in run.rows("samples.jsonl") if row["step"] == 1):
        prompt, response = row["tokens"][: row["prompt_length"]], row["tokens"][row["prompt_length"] :]
        s = table(models["student"], prompt, response).double()
        t = table(models["teacher"], tokenizer(row["teacher_prompts"]["teacher"])["input_ids"], response).double()
        if objective != "full":
            ids = (s if "student" in objective else t).topk(8).indices
            s, t = (
                torch.cat(
                    [p.gather(1, ids), (1 - p.gather(1, ids).exp().sum(1, keepdim=True)).clamp(min=1e-12).log()], 1
                )
                for p in (s, t)
            )
        a, b = (s, t) if "student" in objective else (t, s)  # reverse, forward
        total += float((a.exp() * (a - b)).sum())
        count += len(response)
    assert run.rows("metrics.jsonl")[1]["actor/opd_loss"] == pytest.approx(total / count, rel=1e-3)


@pytest.mark.nightly
def test_a_hint_that_says_nothing_changes_no_bit(stage: Stage) -> None:
    """The hint replaces the question by the same question; keys that are not set change no bit either."""
    bare, same, other = pure(stage), pure(stage, '++teacher.hint="{prompt}"'), pure(stage, HINT)
    assert "teacher_prompts" not in bare.rows("samples.jsonl")[0]
    equal = [
        all(torch.equal(weights(bare)[name], found[name]) for name in found) for found in map(weights, (same, other))
    ]
    assert equal == [True, False]


@pytest.mark.nightly
def test_several_teachers_each_with_its_own_prompt(stage: Stage, models: dict) -> None:
    """In mixed mode: one with a hint, one with a system message for its tags, one with the student's prompt."""
    sections = {
        "hinted": frozen("", "teacher", "[0,1]", 2, 'hint: "({ground_truth})"'),
        "led": frozen("", "teacher", "[0,1]", 2, "system_prompt: add", "tag_included: math_rule"),
        "plain": frozen("", "student", "[1]", 1),
    }
    teachers = ", ".join(f"{name}: {text.removeprefix('++=')}" for name, text in sections.items())
    settings = (*SHORT, *optimizer_of("actor_train"), "max_steps=1", "use_opd=true", "allow_self_teacher=true")
    run = stage.run(*settings, f"++teacher={{{teachers}}}", config=WITH_REWARD)
    assert run.code == 0
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "teacher")
    for row in run.rows("samples.jsonl")[:16]:
        prompt, response = row["tokens"][: row["prompt_length"]], row["tokens"][row["prompt_length"] :]
        assert row["teacher_prompts"].keys() == {"hinted", "led"} and row["teacher_prompts"]["led"].startswith(
            "<|system|>add"
        )
        prompts = {name: tokenizer(text)["input_ids"] for name, text in row["teacher_prompts"].items()} | {
            "plain": prompt
        }
        for name, own in prompts.items():
            naive = sampled(table(models["student" if name == "plain" else "teacher"], own, response), response)
            np.testing.assert_allclose(row["teacher_logprobs"][name], naive, **CLOSE)


def test_rows_without_what_the_hint_is_made_of_end_the_run_before_it_starts(
    stage: Stage, capfd, tmp_path: Path
) -> None:
    settings = (*SHORT, *optimizer_of("student_train"), '++teacher.hint="{solution}"')
    assert stage.run(*settings, config=PURE, place=tmp_path / "none").code == 2
    reported = capfd.readouterr().err
    assert "4000 x no value for a teacher's hint" in reported and "teacher: no 'solution' in the row" in reported
    assert not (tmp_path / "none").exists()
