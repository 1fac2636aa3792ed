"""`roll-opd chat` and `generate` on a run made of the demo's models, compared with transformers and with training."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from after_run_assets import project_with_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_opd.commands.main import main
from roll_opd.data.dataset import open_prompts
from roll_opd.data.templates import load_tokenizer
from roll_opd.extras.after_run.finished_model import finished_model
from roll_opd.extras.after_run.generate_command import read_requests

QUESTION = "661+234="


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project_with_run(tmp_path_factory.mktemp("after run") / "p")


def answer_of(path: Path) -> tuple[str, list[int], list[int]]:
    """Text, prompt and tokens of transformers' greedy answer, without this package."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=48, do_sample=False)[0].tolist()
    size = prompt["input_ids"].shape[1]
    return tokenizer.decode(ids[size:], skip_special_tokens=True), ids[:size], ids[size:]


@pytest.mark.slow
def test_answers_and_reverse_kl_are_those_of_transformers(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["chat", str(run.parent), "--beside", "teacher", "--before", "--prompt", QUESTION]) == 0
    printed = capsys.readouterr().out
    project = run.parents[2]
    text, prompt, tokens = answer_of(project / "models/student")
    head, _, *rows, note = printed.splitlines()
    assert head.split() == ["mine,", "step", "3", "before", "training", "teacher"] and "\x1b" not in printed
    columns = [[row[start : start + 24].strip() for row in rows] for start in (0, 27, 54)]
    assert ["".join(column) for column in columns[:2]] == [text.replace("\n", "")] * 2
    assert "".join(columns[2]) == answer_of(project / "models/teacher")[0].replace("\n", "")
    logits = {
        name: AutoModelForCausalLM.from_pretrained(project / "models" / name)(torch.tensor([[*prompt, *tokens]]))
        .logits[0, len(prompt) - 1 : -1]
        .detach()
        .double()
        for name in ("student", "teacher")
    }
    found = []
    for place in range(len(tokens)):  # the definition, token by token
        p, q = (torch.softmax(logits[name][place], -1).tolist() for name in ("student", "teacher"))
        found.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))
    words = note.replace(",", "").split()
    assert float(words[words.index("mean") + 1]) == pytest.approx(sum(found) / len(found), abs=1e-4)
    assert float(words[words.index("largest") + 1]) == pytest.approx(max(found), abs=1e-4)
    assert int(words[words.index("token", words.index("largest")) + 1]) == 1 + found.index(max(found))


@pytest.mark.slow
def test_a_student_that_is_its_teacher_has_no_reverse_kl_and_remembers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = project_with_run(tmp_path / "p", "teacher")
    monkeypatch.setattr("sys.stdin", io.StringIO("12+34=\n12+34=\n/new\n12+34=\n"))
    assert main(["chat", str(run), "--beside", "teacher"]) == 0
    first, second, third = (part for part in capsys.readouterr().out.split("mine, step 3")[1:])
    assert all("mean 0.0000 nats" in part for part in (first, second, third))
    assert first == third != second, "the second question has the first one before it"


def test_what_cannot_be_asked_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = run.parents[2] / "models/student", tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1" * 3000}) + "\n")
    out = ["--input", str(rows), "--output", str(tmp_path / "out.jsonl")]
    for words, said in (
        (["chat", str(tmp_path / "nowhere")], "nowhere"),
        (["chat", str(tmp_path)], "is not a run directory"),
        (["chat", str(run), "--step", "2"], "complete checkpoints after 3"),
        (["chat", str(run), "--beside", "another"], "its teachers are teacher"),
        (["chat", str(model), "--before"], "needs a run"),
        (["chat", str(model), "--beside", "teacher"], "needs a run"),
        (["chat", str(run), "--temperature", "3"], "--temperature 3"),
        (["generate", str(run), *out], "its prompt has 3000 tokens"),
        (["generate", str(run), *out, "--n", "0"], "--n 0"),
        (["generate", str(run), *out, "--max-tokens", "0"], "--max-tokens 0"),
        (["generate", str(run), "--input", str(tmp_path / "no.jsonl"), "--output", "x.jsonl"], "no.jsonl"),
        (["generate", str(run), "--input", str(rows), "--output", str(tmp_path / "no/x.jsonl")], "no directory"),
    ):
        assert main(words) == 2, words
        assert said in " ".join(capsys.readouterr().err.split()), words
    assert not (tmp_path / "out.jsonl").exists()


def test_prompts_of_a_file_are_those_of_training(run: Path) -> None:
    found = finished_model(run)
    file = run.parents[2] / "data/val.jsonl"
    assert found.plan is not None and found.plan.validation is not None
    prompts, _ = open_prompts(found.plan.validation.data, load_tokenizer(str(found.path)))
    wanted = {prompt.id: prompt.tokens.tolist() for prompt in prompts.read(range(len(prompts)))}
    requests = read_requests(found, str(file))
    assert {row["id"]: tokens for row, tokens in requests} == wanted
    assert [row["id"] for row, _ in requests] == [json.loads(line)["id"] for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_file_of_answers(run: Path, tmp_path: Path) -> None:
    project, output = run.parents[2], tmp_path / "out.jsonl"
    rows = [{"messages": [{"role": "user", "content": QUESTION}], "mine": 7}, {"prompt": "1+1=", "id": "b"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        main(["generate", str(run), "--input", str(tmp_path / "rows.jsonl"), "--output", str(output), "--n", "2"]) == 0
    )
    first, second = map(json.loads, output.read_text().splitlines())
    assert first["responses"] == [answer_of(project / "models/student")[0]] * 2
    assert (first["mine"], first["messages"], second["id"], len(second["responses"])) == (
        7,
        rows[0]["messages"],
        "b",
        2,
    )
