"""Multiple choice: the forms of answers and of rows, and ambiguous cases."""

import random

import pytest

from roll_opd.extras.graders.choices import chosen, options_of, right_choices
from roll_opd.extras.graders.rewards.multiple_choice import MultipleChoice
from roll_opd.rewards.interface import RewardError, RewardSample, Score
from roll_opd.rewards.reward_registry import resolve
from tests.each import each

CITIES = {"A": "Rome", "B": "Paris", "C": "Both A and B", "D": "-5"}

# response -> the letters that it chooses, without options
READ = {
    r"\boxed{B}": "B",
    r"\boxed{\text{B}}": "B",
    r"$\boxed{\mathbf{(B)}}$": "B",
    r"\boxed{B. Paris}": "B",
    r"\boxed{ b }": "B",
    r"\boxed{A}, no: \boxed{B}": "B",
    r"\boxed{\boxed{B}}": "B",
    r"\boxed{B} since \boxed{A": "B",
    r"\boxed{42}. The answer is B.": "B",
    r"<think>\boxed{A}</think>The answer is B": "B",
    r"\boxed{B}. But A is not wrong. The answer is A.": "B",
    "The answer is (B).": "B",
    "The correct answer is **B**: Paris": "B",
    "The correct option is: (B) Paris": "B",
    "The best answer would be B because A is cold": "B",
    "Answer: B\n\nExplanation: A is wrong because of C": "B",
    "**Answer:**\n\n(B)": "B",
    "The answer is A. Wait, the answer is B": "B",
    "the answer is b.": "B",
    "Final answer: option B": "B",
    "<answer>B</answer>": "B",
    "Option B is correct, A is not.": "B",
    "Rome is A. So (B) is the right answer": "B",
    "答案是B，因为A不对": "B",
    "所以正确答案是：B": "B",
    "故选B。": "B",
    "答案为 (B)": "B",
    "选项B正确": "B",
    "B": "B",
    "b": "B",
    "(b)": "B",
    "B) Paris": "B",
    "I think it is B": "B",
    "Vitamin C is not it. I choose B.": "B",
    "So B, not C.": "B",
    "It is A": "A",
    r"\boxed{A, C}": "AC",
    r"\boxed{AC}": "AC",
    r"\boxed{\{A, C\}}": "AC",
    r"\boxed{\textbf{(B)}\ 42}": "B",
    r"The answer is \(B\).": "B",
    "The answer is not (A) but (B)": "B",
    "A is incorrect. C is incorrect. Therefore B": "B",
    "The answer is A and C.": "AC",
    "答案：A、C": "AC",
    # no choice at all
    r"\boxed{Apple}": None,
    r"\boxed{A or B}": "",
    "The answer is A or B": "",
    "The answer is a matter of taste.": None,
    "The answer is A dog": None,
    "A dog": None,
    "I am sure": None,
    "The answer is not A": None,
    "The answer is C++": None,
    "The answer is X-ray": None,
    "None of these": None,
    "<think>The answer is B": None,
    "": None,
}


@each("response", READ)
def test_the_choice_of_a_response(response: str) -> None:
    letters, _ = chosen(response, {})
    assert letters == (None if READ[response] is None else frozenset(READ[response]))


@each(
    ("truth", "letters"),
    [
        *[(text, "B") for text in ("B", "b", "(B)", "B.", "B)", "B) text", "B: text", "(B) text", r"\boxed{B}", "$B$")],
        *[(text, "AC") for text in ("AC", "A,C", "A, C", "A and C", '["A", "C"]', "(A), (C)")],
        *[(text, None) for text in ("Paris", "A cat", "3", "", "B vitamins", '["A", "cats"]')],
    ],
)
def test_the_choice_of_a_ground_truth(truth: str, letters: str | None) -> None:
    assert right_choices(truth, {}) == (None if letters is None else frozenset(letters))


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"\boxed{Paris}", True),
        (r"\boxed{\text{paris.}}", True),
        ("The answer is Paris.", True),
        ("I say it is so:\nParis", True),
        ("The answer is B", True),
        (r"\boxed{Both A and B}", False),
        (r"\boxed{Rome}", False),
        ("Paris or Rome", False),
    ],
)
def test_an_options_text_is_a_choice(response: str, right: bool) -> None:
    for truth in ("B", "Paris"):
        (score,) = MultipleChoice().score([RewardSample("r", response, truth, "t", {"options": CITIES})])
        assert score.value == float(right)


def test_signs_and_quantities_are_part_of_an_options_text() -> None:
    assert chosen(r"\boxed{-5}", CITIES) == (frozenset("D"), True)
    assert chosen(r"\boxed{5}", CITIES)[0] is None
    assert chosen(r"\boxed{Both A and B}", CITIES)[0] == frozenset("C")


def test_options_as_data_sets_have_them() -> None:
    expected = {"A": "Rome", "B": "Paris"}
    for row in (
        {"options": ["Rome", "Paris"]},
        {"choices": ("A. Rome", "B. Paris")},
        {"options": expected},
        {"choices": {"text": ["Rome", "Paris"], "label": ["A", "B"]}},
    ):
        assert options_of(row) == expected
    assert options_of({}) == options_of({"options": "Rome"}) == {}


def test_any_letter_in_any_form_is_read_and_its_neighbour_is_wrong() -> None:
    rng = random.Random(0)
    forms = [r"\boxed{%s}", "The answer is %s.", "Answer: (%s)", "答案是%s", r"Thus $\boxed{\textbf{%s}}$", "%s"]
    for _ in range(300):
        letter, other = rng.sample("ABCDEFGHIJ", 2)
        filler = rng.choice(
            ["", f"Not {other}, I think.\n", f"<think>The answer is {other}.</think>\n", f"({other}) no\n"]
        )
        response = filler + rng.choice(forms) % letter
        samples = [RewardSample("r", response, truth, "t") for truth in (letter, other, letter + other)]
        assert [score.value for score in MultipleChoice().score(samples)] == [1.0, 0.0, 0.0], response


def test_scores_say_what_was_found() -> None:
    samples = [
        RewardSample("1", r"\boxed{B}", "B", "t"),
        RewardSample("2", "The answer is B", "B", "t"),
        RewardSample("3", "no idea", "B", "t"),
        RewardSample("4", "B", None, "t"),
        RewardSample("5", "B", "Paris", "t"),
    ]
    assert MultipleChoice().score(samples) == [
        Score(1.0, {"boxed": 1.0}, "right"),
        Score(1.0, {"boxed": 0.0}, "right"),
        Score(0.0, {"boxed": 0.0}, "no choice"),
        Score(None, reason="ground truth names no option"),
        Score(None, reason="ground truth names no option"),
    ]
    assert [score.value for score in MultipleChoice(require_boxed=True).score(samples[:2])] == [1.0, 0.0]
    with pytest.raises(RewardError, match="require_boxed is 1; write true or false"):
        resolve("multiple_choice", {"require_boxed": 1})
