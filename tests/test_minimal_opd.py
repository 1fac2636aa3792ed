"""`examples/minimal_opd.py` against loops over single tokens, and run as a script."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "examples" / "minimal_opd.py"
MOST_LINES = 150
PROMPTS = 4
STEPS = 12

# runs the script, then prints which of the heavy packages it imported
WATCHED = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("imported:", *({"ray", "vllm", "megatron"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def opd():
    """The script as a module."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the script does
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module(SCRIPT.stem)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer(opd):
    return opd.load_tokenizer(str(opd.DEMO / "models" / "student"))


@pytest.fixture
def student(opd):
    return opd.load_model("student")


@pytest.fixture(scope="module")
def teacher(opd):
    return opd.load_model("teacher").requires_grad_(False)


@pytest.fixture(scope="module")
def prompts(opd, tokenizer):
    return opd.PromptSource(opd.load_prompts("train.jsonl", tokenizer), seed=3).take(PROMPTS)


@pytest.fixture
def rollout(opd, student, prompts):
    torch.manual_seed(5)
    found = opd.sample(student, prompts)
    assert not found.mask_BA.all()  # answers of several lengths, or the mask would not be tested
    return found


def answers(rollout, end):
    """Yield prompt and answer of each sequence as lists, the answer cut behind its first end token."""
    for prompt, answer in zip(rollout.prompts_BP.tolist(), rollout.answers_BA.tolist(), strict=True):
        yield prompt, answer[: answer.index(end) + 1] if end in answer else answer


def token_logprobs(model, prompt, answer):
    """Return the log-prob of each answer token, from one forward pass each: no batch, no padding, no shift."""
    logprobs = []
    for place, token in enumerate(answer):
        logits = model(torch.tensor([prompt + answer[:place]])).logits[0, -1]
        logprobs.append(logits[token] - logits.logsumexp(0))
    return torch.stack(logprobs)


def test_reverse_kl_and_gradient_equal_a_loop_over_tokens(opd, student, teacher, rollout):
    losses, gaps = [], []
    for prompt, answer in answers(rollout, student.config.eos_token_id):
        own = token_logprobs(student, prompt, answer)
        gap = (own - token_logprobs(teacher, prompt, answer)).detach()
        losses.append((gap * own).sum())  # its gradient is that of the reverse KL
        gaps.append(gap)
    tokens = sum(map(len, gaps))
    (sum(losses) / tokens).backward()
    wanted = [parameter.grad.clone() for parameter in student.parameters()]
    norm = torch.stack([gradient.norm() for gradient in wanted]).norm()

    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    found = opd.update(student, optimizer, rollout, opd.compute_logprobs(teacher, rollout))

    assert found == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-5)
    clipped = 1 / max(float(norm), 1)
    for parameter, gradient in zip(student.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * clipped, rtol=1e-3, atol=1e-5)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(opd, student, rollout):
    before = [parameter.clone() for parameter in student.parameters()]
    optimizer = torch.optim.SGD(student.parameters(), lr=1.0)
    assert opd.update(student, optimizer, rollout, opd.compute_logprobs(student, rollout).detach()) == 0
    assert all(map(torch.equal, before, student.parameters()))


def test_only_right_answers_count(opd, tokenizer, prompts):
    texts = [f"1+1+0=2\n{prompt.ground_truth}" for prompt in prompts[:2]] + ["no idea"] * (PROMPTS - 2)
    encoded = tokenizer([text + tokenizer.eos_token + "<|pad|>" * 4 for text in texts], padding=True)
    answers_BA = torch.tensor(encoded["input_ids"])
    ends = (answers_BA == tokenizer.eos_token_id).long()
    rollout = opd.Rollout(torch.zeros(PROMPTS, 1), answers_BA, ends.cumsum(1) - ends == 0)
    assert opd.accuracy(tokenizer, prompts, rollout) == 0.5


@pytest.mark.nightly
@pytest.mark.slow
def test_the_script_lowers_the_reverse_kl_without_ray_vllm_or_megatron():
    command = [sys.executable, "-c", WATCHED, str(SCRIPT), "--steps", str(STEPS)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    kls = [float(kl) for kl in re.findall(r"reverse KL (\S+)", run.stdout)]
    assert len(kls) == STEPS
    assert sum(kls[-3:]) < sum(kls[:3]) / 2
    before, after = re.findall(r"held-out accuracy \w+: +(\S+)", run.stdout)
    assert float(before) < 0.2 and float(after) > 0.5
    assert run.stdout.endswith("imported:\n")


def test_the_file_is_short_and_what_it_names_exists():
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    named = set(re.findall(r"\b(?:roll_opd|docs|examples)/[\w/.]*\w", text))
    assert len(named) > 5
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
