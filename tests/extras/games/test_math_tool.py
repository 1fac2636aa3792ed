"""Mathematics with Python as a tool: files, answers, and programs in the real sandbox."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sandboxes import needs_bwrap

from roll_opd.extras.games import EnvironmentFailure, check, make
from roll_opd.extras.games.math_tool import NOTHING, PythonTool, tool_program

ROWS = [{"problem": f"{n} + {n}?", "answer": 2 * n} for n in range(10)] + [
    {"problem": "Half of 3?", "answer": "\\frac{3}{2}"}
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return str(path)


@pytest.mark.parametrize(
    ("response", "reward", "valid"),
    [
        ("\\boxed{1.5}", 1.0, True),
        ("It is \\boxed{\\frac{6}{4}}.<|im_end|>", 1.0, True),
        ("<think>\\boxed{1}</think>\\boxed{3/2}", 1.0, True),
        ("\\boxed{2}", 0.0, True),
        ("<think>\\boxed{1.5}</think> I have forgotten it", -0.1, False),
        ("1.5", -0.1, False),
        ("\\boxed{", -0.1, False),
        ("", -0.1, False),
        (None, -0.1, False),
        ("\\boxed{" * 5000, -0.1, False),
    ],
)
def test_an_answer_is_judged_and_ends_the_episode(file: str, response: Any, reward: float, valid: bool) -> None:
    env = make("math_python", dataset_name=file, mode="val", format_penalty=-0.1)
    assert env.reset(seed=10) == ("Half of 3?", {"env_instruction": ""})
    observation, given, terminated, truncated, info = env.step(response)
    assert (observation, given, terminated, truncated, info["use_tool"]) == ("", reward, True, False, False)
    metrics = info["metrics"]
    assert (metrics["success"], metrics["action_is_valid"]) == (reward == 1, valid)
    assert metrics.keys() == info["metrics_agg_mode"].keys()
    with pytest.raises(EnvironmentFailure, match="call reset"):
        env.step("\\boxed{1.5}")


def test_which_row_a_seed_asks(file: str) -> None:
    train, val = (make("roll_math", dataset_name=file, mode=mode) for mode in ("train", "val"))
    questions = [row["problem"] for row in ROWS]
    assert [val.reset(seed=seed)[0] for seed in range(22)] == questions * 2
    drawn = [train.reset(seed=seed)[0] for seed in range(200)]
    assert set(drawn) == set(questions) and drawn[:11] != questions
    assert drawn == [train.reset(seed=seed)[0] for seed in range(200)]
    assert [train.reset()[0] for _ in range(12)] == [*questions, questions[0]]


def test_a_file_that_changes_is_read_again(file: str) -> None:
    make("roll_math", dataset_name=file)
    Path(file).write_text('{"q": "1?", "a": "1"}\n')
    env = make("roll_math", dataset_name=file, question_key="q", answer_key="a")
    assert env.reset()[0] == "1?"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ('{"problem": "1?", "answer": "1"}\nno json\n', ":2: is not JSON"),
        ('{"problem": "1?"}\n', ":1: has no text under 'answer', only ['problem']"),
        ('{"problem": "1?", "answer": null}\n', ":1: has no text under 'answer'"),
        ("[1]\n", ":1: has no text under 'problem'"),
        ("\udcff", "is not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    (problem,) = check("roll_math", {"dataset_name": str(path)})
    assert said in problem and str(path) in problem


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```py\na\n```\nand\n```python\nb\n```", "b\n"),
        ("<code>print(2)</code>", "print(2)"),
        ("<code>a</code> <code>b</code> c", "b"),
        ("<code>\n```python\nprint(3)\n```\n</code>", "print(3)\n"),
        ("<think><code>a</code></think> no", None),
        ("```\nplain\n```", None),
        ("<code>never closed", None),
        ("</code><code>", None),
        ("<code></code>", None),
        ("", None),
    ],
)
def test_the_program_in_a_response(response: str, program: str | None) -> None:
    assert tool_program(response) == program


def test_a_program_is_not_run_without_the_tool(file: str) -> None:
    env = make("math_python", dataset_name=file, mode="val", max_tool_uses=0)
    env.reset(seed=2)
    assert env.step("```python\nprint(4)\n``` \\boxed{4}")[1:3] == (1.0, True)


@needs_bwrap
def test_programs_run_until_their_uses_are_up(file: str) -> None:
    env = make("math_python", dataset_name=file, mode="val", max_tool_uses=2)
    assert "up to 2 Python programs" in env.reset(seed=10)[1]["env_instruction"]
    observation, reward, terminated, truncated, info = env.step("Let me see.\n```python\nprint(3 / 2)\n```")
    assert (observation, reward, terminated, truncated, info["use_tool"]) == ("1.5", 0.0, False, False, True)
    assert env.step("<code>print(open('/etc/passwd'))</code>")[0].endswith("'/etc/passwd'")  # not there
    assert env.step("<code>print(1)</code> \\boxed{1.5}")[1:3] == (1.0, True)
    assert env.reset(seed=0)[0] == ROWS[0]["problem"]
    assert env.step("<code>print(1)</code>")[4]["metrics"]["tool_uses"] == 1


@needs_bwrap
def test_the_limit_of_turns_counts_programs(file: str) -> None:
    env = make("math_python", dataset_name=file, max_tool_uses=5, max_steps=1)
    env.reset(seed=0)
    assert env.step("<code>print(1)</code>")[2:4] == (False, True)
    with pytest.raises(EnvironmentFailure, match="call reset"):
        env.step("\\boxed{1}")


@needs_bwrap
def test_the_output_of_programs_is_returned() -> None:
    tool = PythonTool(1.0, most_characters=400)
    reported = {
        "x = 1": NOTHING,
        "print('a'); 1 / 0": 'a\nTraceback (most recent call last):\n  File "program.py", line 1, in <module>\n'
        "ZeroDivisionError: division by zero",
        "print('b'); exit(3)": "b",
        "if": '  File "program.py", line 1\n    if\n      ^\nSyntaxError: invalid syntax',
        "while True: pass": "(ended: time limit)",
        "print(math.pi)": "3.141592653589793",  # names that ROLL gives to programs
        "input()": "EOFError: EOF when reading a line",
        "print('\ud800')": "surrogates not allowed",
        "if __name__ == '__main__': print('main')": "main",
    }
    with ThreadPoolExecutor(4) as threads:
        for expected, given in zip(reported.values(), threads.map(tool.run, reported), strict=True):
            assert given.strip().endswith(expected.strip())
    long = tool.run("print('x' * 10**6)")
    assert len(long) < 500 and "999600 characters left out" in long


def test_without_a_sandbox_the_first_program_says_so(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    env = make("math_python", dataset_name=file, max_tool_uses=1, tool_seconds=7)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailure, match=r"bubblewrap \(bwrap\) is not installed"):
        env.step("<code>print(1)</code>")
