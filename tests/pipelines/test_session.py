"""`roll_opd.open` and rewards from a script, on the demo's models: one session, and the code of docs/python.md."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import roll_opd
from roll_opd.api import Session

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples/demo/onpolicy_distill.yaml"
ROLES = ("student_train", "student_infer", "teacher")
OVERRIDES = [
    *("rollout_batch_size=8", "num_return_sequences_in_group=2", "max_steps=1", "save_steps=1", "eval_steps=0"),
    *("validation=null", "num_gpus_per_node=1", "deterministic=true"),
    *(f"{role}.device_mapping=[0]" for role in ROLES),
    *("student_train.training_args.per_device_train_batch_size=16",),
    "student_train.training_args.gradient_accumulation_steps=1",
]


def characters(samples: list) -> list[float]:
    return [float(len(sample.response)) for sample in samples]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    suffix = 0.5  # a function of a script may refer to what surrounds it

    def reward(samples: list) -> list[float]:
        return [value + suffix for value in characters(samples)]

    output = f"output_dir={tmp_path_factory.mktemp('session')}"
    with roll_opd.open(CONFIG, [*OVERRIDES, output], rewards={"math_rule": reward}) as opened:
        yield opened


def test_gradients_add_up_until_the_optimizer_step(session: Session) -> None:
    prompts = session.prompts(8)
    session.student.forward_backward(greedy := session.teacher.score(session.sampler.sample(prompts, temperature=0)))
    once = session.student.optim_step(learning_rate=0.0)
    session.sampler.update()
    again = session.teacher.score(session.sampler.sample(prompts, temperature=0))
    assert again.texts == greedy.texts
    for _ in range(2):
        session.student.forward_backward(again)
    twice = session.student.optim_step(learning_rate=0.0)
    assert once["actor/lr"] == twice["actor/lr"] == 0
    assert twice["actor/grad_norm"] == pytest.approx(2 * once["actor/grad_norm"], rel=1e-5)
    with pytest.raises(ValueError, match="call forward_backward first"):
        session.student.optim_step()


def test_samples_of_earlier_weights_are_refused_without_a_correction(session: Session) -> None:
    session.sampler.update()
    batch = session.teacher.score(session.sampler.sample(session.prompts(2)))
    session.student.forward_backward(batch)
    session.student.optim_step()
    with pytest.raises(RuntimeError, match=r"were sampled by weights of version .* Set train_infer_correction"):
        session.student.forward_backward(batch)


def test_a_batch_with_rewards_learns_from_them_and_from_the_teacher(session: Session) -> None:
    session.sampler.update()
    batch = session.teacher.score(session.sampler.sample(session.prompts(2), n=4))
    pure = session.student.forward_backward(batch)["actor/pg_loss"]
    rewards = np.array([0, 1, 2, 3, 1, 1, 0, 5], float)
    mixed = session.student.forward_backward(batch.with_rewards(rewards), adv_estimator="reinforce")["actor/pg_loss"]
    tokens = np.array([sample.action_tokens for sample in batch.samples])
    # gamma is 0 in the demo's configuration: a reward counts at its sample's last token
    assert mixed - pure == pytest.approx(-rewards.sum() / tokens.sum(), rel=1e-4)
    with pytest.raises(ValueError, match="on_policy_distill ignores them"):
        session.student.forward_backward(batch.with_rewards(rewards))
    without = session.student.forward_backward(batch, opd_kl_coef=0.0)["actor/pg_loss"]
    assert without == pytest.approx(0, abs=1e-6)
    session.student.optim_step(learning_rate=0.0)
    with pytest.raises(ValueError, match="7 rewards for 8 samples"):
        batch.with_rewards([0.0] * 7)


def test_a_function_of_the_script_is_the_reward(session: Session) -> None:
    batch = session.sampler.sample([[{"role": "user", "content": "661+234="}]], n=3)
    assert session.reward(batch).rewards == [len(text) + 0.5 for text in batch.texts]


def test_a_call_that_fails_leaves_the_session_usable(session: Session) -> None:
    batch = session.teacher.score(session.sampler.sample(session.prompts(1), n=1))
    with pytest.raises(ValueError, match="no key nonsense; known are"):
        session.student.forward_backward(batch, nonsense=1)
    assert batch.reverse_kl() == pytest.approx(session.teacher.score(batch).reverse_kl())


def test_a_saved_model_loads_in_transformers_and_its_state_again(session: Session, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = session.student.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert sum(parameter.numel() for parameter in loaded.parameters()) > 0
    session.student.load(tmp_path)


@pytest.mark.nightly
def test_a_step_of_a_session_is_the_pipelines_step_bit_for_bit(tmp_path: Path) -> None:
    result = roll_opd.run(CONFIG, [*OVERRIDES, f"output_dir={tmp_path / 'run'}"])
    with roll_opd.open(CONFIG, [*OVERRIDES, f"output_dir={tmp_path / 'session'}"]) as session:
        session.student.forward_backward(session.teacher.score(session.sampler.sample(session.prompts(8))))
        session.student.optim_step()
        saved = session.student.save(tmp_path / "saved")
    ours, theirs = (load_file(Path(directory) / "model.safetensors") for directory in (saved, result["model"]))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_reward_that_cannot_be_sent_is_refused_by_name() -> None:
    lock = __import__("threading").Lock()

    def reward(samples: list) -> list[float]:
        with lock:
            return characters(samples)

    with pytest.raises(TypeError, match="rewards: math_rule refers to an object that cannot be sent"):
        roll_opd.run(CONFIG, rewards={"math_rule": reward})


@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 1])
def test_the_code_of_the_page_runs(number: int, tmp_path: Path) -> None:
    page = (ROOT / "docs/python.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]
    script = tmp_path / "script.py"
    script.write_text(code.replace("range(20)", "range(2)").replace('"output/', f'"{tmp_path}/'))
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
