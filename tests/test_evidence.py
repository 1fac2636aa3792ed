"""benchmarks/claims.md and docs/evidence.md against the result files, and the first claim in small without engines."""

import gzip
import importlib
import itertools
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.each import each

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "claims"
FILES = sorted(RESULTS.rglob("*.json"))  # `repeated`: seeds 1 to 3 on another machine, `unseen`: 7 to 9
CLAIMS = REPOSITORY / "examples" / "claims"
REAL = REPOSITORY / "benchmarks" / "results" / "gpu" / "2026-11-27_h200_smollm2"
PAGE = REPOSITORY / "benchmarks" / "claims.md"
SUMMARIES = [REPOSITORY / "docs" / name for name in ("modes.md", "evidence.md")]
SECTION = re.compile(r"^## .*?\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"results/claims/((?:unseen/|repeated/)?[\w-]+)\.json")
TITLED = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ADVICE = re.compile(r"^(\| .*\]\(\.\./benchmarks/claims\.md#([\w-]+)\).*) \|$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.:/-])\d[\d,]*(?:\.\d+)?(?![\w/-])")


def prose_of(section: str) -> str:
    """The section without quotations of papers, code and links."""
    lines = [line for line in section.splitlines() if not line.startswith((">", "    "))]
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", "\n".join(lines))


def numbers_in(value: object) -> set[float]:
    """All numbers in JSON, also those in its keys and texts."""
    if isinstance(value, dict):
        return set().union(*(numbers_in(part) for pair in value.items() for part in pair))
    if isinstance(value, list):
        return set().union(set(), *map(numbers_in, value))
    if isinstance(value, str):
        return {float(number.replace(",", "")) for number in NUMBER.findall(value)}
    return {float(value)} if isinstance(value, int | float) else set()


def is_in(shown: str, known: set[float]) -> bool:
    decimals = len(shown.partition(".")[2])
    return any(round(number, decimals) == float(shown.replace(",", "")) for number in known)


def sections() -> list[tuple[list[str], str]]:
    """(names of the result files, text) of the page's claims."""
    texts = SECTION.findall(PAGE.read_text(encoding="utf-8"))
    return [(LINK.findall(text), text) for text in texts if LINK.search(text)]


@each(("names", "text"), sections())
def test_every_number_of_a_section_is_in_its_result_files(names: list[str], text: str) -> None:
    known = numbers_in([json.loads((RESULTS / f"{name}.json").read_text()) for name in names])
    assert [shown for shown in NUMBER.findall(prose_of(text)) if not is_in(shown, known)] == []


def test_a_number_that_was_not_measured_is_found() -> None:
    known = numbers_in({"figures": {"OPD 8 steps": 21.04}})
    assert [is_in(shown, known) for shown in ("8", "21", "21.0", "21.04", "22", "20.9")] == [True] * 4 + [False] * 2


@each("file", FILES)
def test_every_run_that_was_started_is_in_its_result_file(file: Path) -> None:
    result = json.loads(file.read_text())
    assert [{"arm": run["arm"], "seed": run["seed"]} for run in result["runs"]] == result["started"]
    assert all(run["finished"] for run in result["runs"])
    assert len({one["seed"] for one in result["started"]}) >= 3
    assert str(file.relative_to(RESULTS).with_suffix("")) in {name for names, _ in sections() for name in names}


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch):
    """Imports modules of examples/claims and benchmarks by name; they are removed after the test."""
    known = set(sys.modules)
    threads = torch.get_num_threads()
    for directory in (CLAIMS, REPOSITORY / "benchmarks"):
        monkeypatch.syspath_prepend(str(directory))
    yield importlib.import_module
    for name in set(sys.modules) - known:
        file = str(getattr(sys.modules[name], "__file__", ""))
        if file.startswith((f"{REPOSITORY}/examples", f"{REPOSITORY}/benchmarks")):
            del sys.modules[name]
    torch.set_num_threads(threads)


def test_figures_and_verdicts_follow_from_the_runs(claims) -> None:
    judged = claims("claims").judged
    for file in FILES:
        result = json.loads(file.read_text())
        bars = {arm: values["bar"] for arm, values in result["arms"].items()}
        assert judged(claims(file.stem.partition("-")[0]), result, bars).items() <= result.items()


def test_the_page_s_table_has_all_findings_and_each_holds_with_all_seeds_and_tasks() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for file in FILES:
        result = json.loads(file.read_text())
        for ending in ("", "_again"):
            found = result.get(f"findings{ending}", result["findings"])
            assert all(found.values()), file.stem
            assert f"| `{file.stem.partition('-')[0]}` | {'; '.join(found)} |" in text


def test_the_page_states_the_cost_of_all_claims(claims) -> None:
    results = [json.loads(file.read_text()) for file in RESULTS.glob("*.json")]
    (stated,) = re.findall(
        r"All\s+measured\s+claims\s+together\s+take\s+(\S+)\s+CPU-hours,\s+and\s+the\s+peak\s+memory\s+is\s+(\S+)\s+GiB",
        PAGE.read_text(encoding="utf-8"),
    )
    assert tuple(map(float, stated)) == claims("results").cost(results)
    seconds = [run["seconds"] for result in results for run in result["runs"]]
    assert float(stated[0]) == pytest.approx(np.sum(seconds) / 3600, abs=0.005)
    assert float(stated[0]) < 3  # hours, of all claims one after the other


# the real model has figures of its own
ADVICES = [row for page in SUMMARIES for row in ADVICE.findall(page.read_text("utf-8")) if row[1] != "one-real-model"]


def test_the_numbers_of_a_summary_are_figures_of_its_section() -> None:
    texts = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-"): text
        for heading, text in TITLED.findall(PAGE.read_text(encoding="utf-8"))
    }
    assert len(ADVICES) > 20
    for row, anchor in ADVICES:
        results = [json.loads((RESULTS / f"{name}.json").read_text()) for name in LINK.findall(texts[anchor])]
        known = numbers_in([{key: value for key, value in result.items() if key != "runs"} for result in results])
        assert [shown for shown in NUMBER.findall(prose_of(row)) if not is_in(shown, known)] == [], row


def test_a_right_answer_is_a_chain_and_one_wrong_digit_is_not(claims) -> None:
    made = claims("make_chains")
    for task in (*made.TASKS.values(), *map(made.second, made.TASKS.values())):
        for question in made.questions(task, 20, seed=1):
            answer = made.right_answer(task, question, 9)
            digits = [task.alphabet.index(letter) for letter in question + answer]
            for place in range(3, 12):
                total = digits[place - 1] + task.plus + digits[place - 3] % task.remainder
                assert digits[place] == total % 10
            wrong = answer[:4] + task.write([(digits[7] + 1) % 10]) + answer[5:]
            assert claims("lab").graded(task, [question] * 2, [answer, wrong], 9).tolist() == [1, 0]


def test_wraps_are_nearly_half_of_the_places_and_random_for_the_student(claims) -> None:
    made = claims("make_chains")
    task, rng = made.TASKS["threes"], np.random.default_rng(0)
    totals = [task.total(row) for row in rng.integers(0, 10, (4000, 3)).tolist()]
    assert 0.42 < np.mean([total >= 10 for total in totals]) < 0.48
    assert {total for total in totals} == set(range(3, 16))


def test_grpo_advantages_are_rewards_normalised_in_their_group(claims) -> None:
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, 1], np.float32)
    advantages = claims("lab").reward(np.zeros((8, 3), np.float32), np.zeros((8, 3), np.float32), rewards.reshape(2, 4))
    assert advantages == pytest.approx(np.outer([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0], np.ones(3)), abs=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_in_small_the_teacher_teaches_what_the_reward_does_not(claims) -> None:
    lab, made = claims("lab"), claims("make_chains")
    engine, task = claims("loop").Loop(CLAIMS / "assets", "threes"), made.TASKS["threes"]
    *_, dense = lab.train(engine, task, "OPD", lab.Arm(lab.on_policy(lab.teacher), steps=100, bar=0.1), seed=1)
    assert dense.curve[-1]["accuracy"] >= 0.1
    arm = lab.Arm(lab.on_policy(lab.reward), steps=dense.curve[-1]["step"], bar=0.1, learning_rate=5e-4)
    *_, sparse = lab.train(engine, task, "GRPO", arm, seed=1)
    assert max(row["accuracy"] for row in sparse.curve) < 0.1


@pytest.mark.nightly
@pytest.mark.slow
def test_the_engines_start_from_the_same_student_and_both_train_it(claims, tmp_path: Path) -> None:
    lab, made = claims("lab"), claims("make_chains")
    asked = made.questions(made.TASKS["threes"], 40, seed=3)
    loop = claims("loop").Loop(CLAIMS / "assets", "threes")
    expected = loop.sample(asked, 6, greedy=True)
    with claims("session").opened(CLAIMS / "assets", "threes", tmp_path) as session:
        assert np.mean([a == b for a, b in zip(session.sample(asked, 6, greedy=True), expected, strict=True)]) > 0.95
        arm = lab.Arm(lab.on_policy(lab.teacher), length=6, steps=2)
        *_, run = lab.train(session, made.TASKS["threes"], "OPD", arm, seed=1)
        assert [row["step"] for row in run.curve] == [0, 1, 2]
        assert session.sample(asked, 6, greedy=True) != expected
        session.reset(1)
        assert np.mean([a == b for a, b in zip(session.sample(asked, 6, greedy=True), expected, strict=True)]) > 0.95


@pytest.mark.nightly
@pytest.mark.slow
def test_the_claim_of_the_page_is_complete(claims, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "claim_of_the_page.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    claim, lab, task = claims("claim_of_the_page"), claims("lab"), claims("make_chains").TASKS["threes"]
    engine = claims("loop").Loop(CLAIMS / "assets", "threes")
    runs = [
        asdict([*lab.train(engine, task, name, replace(arm, steps=2), seed=1)][-1]) for name, arm in claim.ARMS.items()
    ]
    found = claims("results").Runs(runs, {name: arm.bar for name, arm in claim.ARMS.items()})
    assert claim.__doc__
    assert set(claim.holds(claim.figures(found)).values()) <= {True, False}
    assert claims("results").plot(found, claim.PANELS).count("<path d=") > len(runs)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.parent.name for path in CLAIMS.glob("*/__init__.py")))
def test_every_arm_of_a_claim_makes_a_step(claims, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, loop, task = claims("lab"), claims("loop"), claims("make_chains").TASKS["threes"]
    engine, fit, calls = loop.Loop(CLAIMS / "assets", "threes"), loop.Loop.fit, []
    # the supervised training of a start has hundreds of steps; here it has the first ones
    monkeypatch.setattr(loop.Loop, "fit", lambda *args: calls.append(0) or (len(calls) < 20 and fit(*args)))
    claim, runs = claims(name), []
    for arm in claim.ARMS:
        *_, run = lab.train(engine, task, arm, replace(claim.ARMS[arm], steps=1, length=4), seed=1)
        assert [row["step"] for row in run.curve][-1] == 1 or run.curve[0]["accuracy"] >= claim.ARMS[arm].bar
        runs.append(asdict(run))
    found = claims("results").Runs(runs, {arm: claim.ARMS[arm].bar for arm in claim.ARMS})
    assert claim.holds(claim.figures(found))
    assert claims("results").plot(found, claim.PANELS).startswith("<svg")


def test_only_the_truncated_sum_pulls_a_student_that_equals_its_teacher(claims) -> None:
    claim = claims("topk_tail")
    logits = torch.randn((2, 3, 12), generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens = torch.zeros((2, 3), dtype=torch.int64)
    pulls = {}
    for name, loss in claim.LOSSES.items():
        student = logits.log_softmax(-1)
        (pulls[name],) = torch.autograd.grad(loss(student, student.detach(), tokens), logits)
    assert {name for name, pull in pulls.items() if pull.abs().max() > 1e-6} == {"top-4, truncated"}
    mass = logits.softmax(-1).topk(claim.TOP).values.sum()
    (rise,) = torch.autograd.grad(mass, logits)
    assert (rise * pulls["top-4, truncated"]).sum() > 0  # a step down the loss lowers the mass


def test_the_reverse_losses_have_equal_gradients_for_fresh_samples_only(claims) -> None:
    claim, made = claims("staleness"), claims("make_chains")
    engine = claims("loop").Loop(CLAIMS / "assets", "threes")
    engine.sample(made.questions(made.TASKS["threes"], 4, seed=1), 4, greedy=False)
    fresh = engine.logprobs(engine.student).detach()
    parameter = engine.student.model.layers[0].mlp.up_proj.weight
    for shift, equal in ((0.0, True), (0.5, False)):
        old = claim.Old(engine.rollout, fresh - shift, np.zeros((1, 4), np.float32))
        losses = (claim.stored, claim.recomputed, claim.weighted)
        pulls = [torch.autograd.grad(loss(engine, old), parameter)[0] for loss in losses]
        for one, other in itertools.combinations(pulls, 2):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-6) == equal


def test_the_step_of_an_alarm_follows_from_its_shares(claims) -> None:
    steps = [{"step": 0}, {"step": 4, "alarm": 0.0}, {"step": 8, "alarm": 0.5}, {"step": 9, "alarm": 1.0}]
    runs = claims("results").Runs([{"arm": "a", "curve": steps}, {"arm": "a", "curve": steps[:2]}], {})
    assert runs.alarm_steps("a") == [7, 5]


def test_a_row_has_the_teacher_of_its_task(claims) -> None:
    claim, made = claims("two_teachers"), claims("make_chains")
    engine, task = claims("loop").Loop(CLAIMS / "assets", "threes"), made.TASKS["threes"]
    asked = [question for one in (task, made.second(task)) for question in made.questions(one, 4, seed=1)]
    engine.sample(asked, 4, greedy=False)
    # the student itself as a teacher has the advantage 0
    for experts, zero in (
        ([engine.student, engine.teacher], slice(0, 4)),
        ([engine.teacher, engine.student], slice(4, 8)),
    ):
        advantages = claim.teachers(engine, experts, torch.zeros(0))
        assert (advantages == 0).all(1).nonzero().flatten().tolist() == list(range(8))[zero]


def test_runs_of_several_machines_keep_their_machine(claims, tmp_path: Path) -> None:
    file = tmp_path / "claim.json"
    runs = [
        {"arm": "a", "seed": 1, "finished": True},
        {"arm": "a", "seed": 2, "finished": True, "machine": {"cores": 16}},
    ]
    file.write_text(json.dumps({"machine": {"cores": 2}, "peak_bytes": 7, "runs": [*runs, {}]}))
    kept, peak = claims("claims").earlier(file)
    assert {key: run["machine"]["cores"] for key, run in kept.items()} == {("a", 1): 2, ("a", 2): 16} and peak == 7


REAL_FIGURES = json.loads((REAL / "figures.json").read_text())


@pytest.mark.parametrize("seed", ["42", "43", "44"])
@pytest.mark.parametrize(
    ("part", "run", "tag", "label"),
    [
        ("facts", "facts", "general_rule", "correct"),
        ("recovery", "recover_opd", "capitals", "capitals"),
        ("recovery", "recover_opd", "facts", "facts"),
    ],
)
def test_the_real_model_s_figures_are_those_of_its_records(
    part: str, run: str, tag: str, label: str, seed: str
) -> None:
    found, key = REAL_FIGURES[part][seed], f"val_correct/{tag}/mean"
    with gzip.open(REAL / f"{run}_{seed}" / "metrics.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if key in row]
    assert [row["step"] for row in rows] == found["steps"]
    assert [row[key] * found[f"{label}_questions"] for row in rows] == pytest.approx(found[label])


@pytest.mark.parametrize("name", sorted(REAL_FIGURES["answers_by_transformers"]))
def test_the_real_model_s_answers_are_counted_again(name: str) -> None:
    rows = json.loads((REAL / name / "answers.json").read_text())["answers"]
    for model, tags in REAL_FIGURES["answers_by_transformers"][name].items():
        correct = [row["expected"].lower() in re.findall(r"\w+", row[model].lower()) for row in rows]
        assert sum(correct) == sum(tag["correct"] for tag in tags.values())
        assert len(correct) == sum(tag["questions"] for tag in tags.values())


def test_every_number_about_the_real_model_is_one_of_its_figures() -> None:
    (text,) = [text for title, text in TITLED.findall(PAGE.read_text(encoding="utf-8")) if title == "One real model"]
    known = numbers_in(REAL_FIGURES)
    assert [shown for shown in NUMBER.findall(prose_of(text)) if not is_in(shown, known)] == []
