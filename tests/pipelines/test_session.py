"""`roll_opd.open` and rewards from a script, on the demo's models: one session, and the code of docs/python.md.

The roles of the session share a device and offload their memory, which is the default on GPUs.
"""

import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file
from session_orders import VARIANTS, assert_orders_agree, assert_reads_keep_the_gradient

import roll_opd
from roll_opd.api import Batch, Session
from roll_opd.base import frozen

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples/demo/onpolicy_distill.yaml"
MODEL = ROOT / "examples/demo/models/student"
ROLES = ("student_train", "student_infer", "teacher")
OVERRIDES = [
    *("rollout_batch_size=8", "num_return_sequences_in_group=2", "max_steps=1", "save_steps=1", "eval_steps=0"),
    *("validation=null", "num_gpus_per_node=1", "deterministic=true", "is_offload_states=true"),
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


@pytest.mark.nightly
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


def test_samples_are_tested_with_the_settings_of_their_call(session: Session) -> None:
    """Without them, top-p 0.5 differs by 0.02 nats per token, and top-k 2 by 6e-4."""
    for settings in ({"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.5, "top_p": 0.8}):
        session.sampler.update()
        metrics = session.student.forward_backward(
            session.teacher.score(session.sampler.sample(session.prompts(8), **settings))
        )
        assert metrics["rollout/engine/compared"] > 100, settings
        assert metrics["rollout/engine/difference"] < 1e-5, settings
    session.student.optim_step(learning_rate=0.0)


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
    session.sampler.update()
    batch = session.sampler.sample([[{"role": "user", "content": "661+234="}]], n=3)
    assert session.reward(batch).rewards == [len(text) + 0.5 for text in batch.texts]


def test_a_call_that_fails_leaves_the_session_usable(session: Session) -> None:
    session.sampler.update()
    batch = session.teacher.score(session.sampler.sample(session.prompts(1), n=1))
    with pytest.raises(ValueError, match="no key nonsense; known are"):
        session.student.forward_backward(batch, nonsense=1)
    assert batch.reverse_kl() == pytest.approx(session.teacher.score(batch).reverse_kl())


def test_calls_between_gradients_change_nothing(session: Session, tmp_path: Path) -> None:
    assert_reads_keep_the_gradient(session, range(4), tmp_path)


def test_a_failure_on_the_ranks_drops_the_gradient(session: Session) -> None:
    """A part of the batch's gradient may have been added, so nothing of it is kept."""
    prompts, student = session.prompts(2), session.student
    norms = []
    for is_broken in (False, True):
        session.sampler.update()
        batch = session.teacher.score(session.sampler.sample(prompts, n=1, temperature=0))
        if is_broken:
            student.forward_backward(batch)
            with pytest.raises(
                RuntimeError, match=r"this loss is broken.* accumulated since the last optim_step are lost"
            ):
                student.forward_backward(batch, loss="session_orders.broken_loss")
            with pytest.raises(ValueError, match="call forward_backward first"):
                student.optim_step()
        student.forward_backward(batch)
        norms.append(student.optim_step(0.0)["actor/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_mistakes_end_only_their_call(session: Session, tmp_path: Path) -> None:
    """Every mistake is one sentence of a built-in type. The session then gives the same results as before."""
    session.sampler.update()
    sampler, teacher, student = session.sampler, session.teacher, session.student
    plain = sampler.sample(prompts := session.prompts(2), n=2, temperature=0)
    scored = teacher.score(plain)
    of_another = Batch(scored.samples, scored.texts, "another")
    empty = Batch((), (), session.id)
    (tmp_path / "file").write_text("")
    nan, forward = float("nan"), student.forward_backward
    rewarded = scored.with_rewards([0, 1, 0, 1])
    mistakes: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        *((sampler.sample, (value,), {}) for value in PROMPTS),
        *((sampler.sample, (prompts, n), {}) for n in (0, -1, 1.5, "2", True, nan, [1], 10**9)),
        *((sampler.sample, (prompts,), {name: value}) for name, values in SAMPLING.items() for value in values),
        *((session.prompts, (n,), {}) for n in (0, -1, "2", None, 1.5)),
        *((teacher.score, (batch,), {}) for batch in (None, [], "a", empty, of_another)),
        *((forward, (batch,), {}) for batch in (plain, rewarded, empty, of_another, scored.samples, None)),
        *((forward, (scored,), keys) for keys in OBJECTIVES),
        (forward, (plain.with_rewards(range(4)),), {"adv_estimator": "reinforce"}),
        (forward, (rewarded,), {"adv_estimator": "gae"}),
        *(
            (scored.with_rewards, (rewards,), {})
            for rewards in ([nan] * 4, [1.0], "abcd", [1e999] * 4, None, [None] * 4)
        ),
        *((student.optim_step, (rate,), {}) for rate in (nan, -1, float("inf"), "1e-5", [1], None)),
        *((student.load, (path,), {}) for path in (tmp_path, tmp_path / "missing", tmp_path / "file", MODEL, "", None)),
        *((student.save, (path,), {}) for path in (tmp_path / "file", "", 3)),
    ]
    student.forward_backward(scored)
    expected = student.optim_step(0.0)["actor/grad_norm"]
    sampler.update()
    for method, values, keys in mistakes:
        with pytest.raises((ValueError, TypeError, OSError, RuntimeError)) as raised:
            method(*values, **keys)
        kind, text = type(raised.value), str(raised.value)
        of = (method.__name__, values, keys, kind, text)
        assert kind.__module__ == "builtins" and 10 < len(text) < 1200 and "\n" not in text, of
        assert "Traceback" not in text and "ray::" not in text and ".py" not in text, of
    student.forward_backward(teacher.score(sampler.sample(prompts, n=2, temperature=0)))
    assert student.optim_step(0.0)["actor/grad_norm"] == pytest.approx(expected, rel=1e-6)


PROMPTS = (
    "661+234=",
    [],
    [{"role": "user", "content": "1+1="}],
    None,
    3,
    [3],
    [None],
    [[]],
    [[1, 2]],
    ["1+" * 500],
    [""],
)
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, 0.001, 3, float("nan"), "hot", None, [1.0]),
    "top_p": (0, 1.5, -1, float("inf")),
    "top_k": (-2, 0.5, "3"),
    "max_new_tokens": (0, -1, 10**6, 2.5, None),
    "repetition_penalty": (0, -1),
    "max_tokens": (3,),
    "callback": (print,),
}
OBJECTIVES: tuple[dict[str, Any], ...] = (
    *({"loss": loss} for loss in ("grppo", "grpo", "", 3, "nowhere.loss", "dpo", "sft", "mix")),
    *({"opd_objective": name} for name in ("topk", "full", "sampeld")),
    *({"opd_kl_coef": value} for value in (-1, float("nan"), "1")),
    *({"adv_estimator": name} for name in ("gae", "nonsense", 3)),
    *({key: 1} for key in ("ppo_epochs", "max_age", "paired", "opd_topk", "gamma", "opd_jsd_beta", "pg_clip")),
    {"entropy_loss_coef": "much"},
    {"entropy_loss_coef": float("nan")},
    {"loss_agg_mode": "nonsense"},
    {"policy_loss_args": {"nonsense": 1}},
    {"kl_loss_coef": 0.1},
    {"opd_divergnce": "jsd"},
)


def test_an_interrupt_ends_only_the_call(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT arrives while `sample` waits for its answer, and while the answer of `prompts` is read."""
    session.sampler.update()
    prompts = session.prompts(64)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    batch = session.sampler.sample(prompts[:1], n=1)
    for seconds in (0.02, 0.06, 0.2):
        session.teacher.score(batch)  # takes the engines' memory, so `sample` sends the weights first
        timer = threading.Timer(seconds, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            session.sampler.sample(prompts, n=32)
        timer.join()
    with monkeypatch.context() as reading, pytest.raises(KeyboardInterrupt):
        left = [signal.SIGINT]
        reading.setattr(frozen, "freeze", lambda value: (left and signal.raise_signal(left.pop())) or value)
        session.prompts(1)
    signal.signal(signal.SIGINT, before)
    batch = session.teacher.score(session.sampler.sample(session.prompts(1), n=1))
    assert len(batch) == 1 and "\n" not in repr(batch) and "reverse KL" in repr(batch)


def of_session(session: Session, title: str) -> list[psutil.Process]:
    """Return the processes of a session with a title that begins with `title`."""
    found = []
    for process in psutil.Process(session._process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            found += [process] if " ".join(process.cmdline()).startswith(title) else []
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("shares", [False, True])
def test_a_transfer_of_weights_that_fails_leaves_no_engine_that_waits(tmp_path: Path, *, shares: bool) -> None:
    """The engines have begun the update when the student finds no memory for the weights."""
    engines = () if shares else ("is_offload_states=false", "student_infer.device_mapping=[1,2]", "num_gpus_per_node=3")
    with roll_opd.open(CONFIG, [*OVERRIDES, *engines, f"output_dir={tmp_path}"]) as session:
        (student,) = of_session(session, "ray::TrainWorker")
        before = resource.prlimit(student.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(student.pid, resource.RLIMIT_FSIZE, (2**16, before[1]))
        with pytest.raises(roll_opd.RunFailed if shares else OSError, match="File too large"):
            session.sampler.update()
        if shares:  # the engines take turns with the student, and cannot be replaced
            return
        resource.prlimit(student.pid, resource.RLIMIT_FSIZE, before)
        with pytest.raises(ValueError, match=r"call sampler\.update first"):
            session.sampler.sample(session.prompts(1), n=1)
        session.sampler.update()
        assert len(session.sampler.sample(session.prompts(4), n=1)) == 4
        for process in of_session(session, "ray::RolloutWorker"):
            process.kill()  # both engines: their new processes get the weights while the call waits
        assert len(session.sampler.sample(session.prompts(4), n=1)) == 4


@pytest.mark.nightly
def test_a_session_without_with_ends_with_its_script(tmp_path: Path) -> None:
    """The script ends without a traceback, and no process is left."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import roll_opd\nsession = roll_opd.open({str(CONFIG)!r}, {[*OVERRIDES, f'output_dir={tmp_path}']!r})\n"
        "batch = session.sampler.sample(session.prompts(1))\nprint('run', session._process.pid)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert (found := re.search(r"^run (\d+)$", done.stdout, re.MULTILINE))
    assert not psutil.pid_exists(int(found[1]))
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_order_of_calls_is_the_same_without_offloading(variant: str, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, *VARIANTS[variant], f"output_dir={tmp_path}"]
    rewards = {"math_rule": characters}
    with (
        roll_opd.open(CONFIG, overrides, rewards=rewards) as shares,
        roll_opd.open(CONFIG, [*overrides, "is_offload_states=false"], rewards=rewards) as alone,
    ):
        assert_orders_agree(shares, alone, range(40), tmp_path)


def test_a_saved_model_loads_in_transformers_and_its_state_again(session: Session, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = session.student.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert sum(parameter.numel() for parameter in loaded.parameters()) > 0
    session.sampler.update()
    before = session.sampler.sample(session.prompts(1))
    session.student.load(tmp_path)
    with pytest.raises(RuntimeError, match="were sampled by weights of version"):
        session.student.forward_backward(session.teacher.score(before))
    for inner in ("state", "hf"):
        with pytest.raises(ValueError, match=f"give {tmp_path}"):
            session.student.load(tmp_path / inner)


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
