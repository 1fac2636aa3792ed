"""The rewards for CrossThinkQA and general rules: short answers against their ground truths."""

import pytest
from test_terms import of_length

from roll_opd.extras.graders.rewards.crossthinkqa import CrossThinkQA
from roll_opd.extras.graders.rewards.general_rule import GeneralRule, f1
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score
from roll_opd.rewards.patterns import SECONDS
from roll_opd.rewards.reward_registry import resolve


@pytest.mark.parametrize(
    ("response", "loose", "soft", "strict"),
    [
        (r"\boxed{B}", 1.0, 1.0, 1.0),
        ("The answer is B", 1.0, 0.5, -1.0),
        (r"\boxed{A}", -1.0, -0.5, -1.0),
        ("The answer is A", -1.0, -1.0, -1.0),
        ("no idea", -1.0, -1.0, -1.0),
    ],
)
def test_crossthinks_answers_are_worth_what_roll_says(response: str, loose: float, soft: float, strict: float) -> None:
    for reward_type, worth in {"loose": loose, "soft": soft, "strict": strict}.items():
        (score,) = CrossThinkQA(reward_type).score([RewardSample("r", response, "B", "t")])
        assert score.value == worth
        assert score.parts == {"right": float(loose == 1.0), "boxed": float("boxed" in response)}


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        (r"\boxed{Mitochondria}", "the mitochondria", True),
        (r"\boxed{\text{Mitochondria}}", "mitochondria.", True),
        ("The answer is DNA.", "DNA", True),
        ("The answer is RNA.", "DNA", False),
        (r"\boxed{E. coli}", "E. coli", True),
        (r"\boxed{E}", "E. coli", False),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{1,000}", "1000", True),
        (r"\boxed{-5}", "5", False),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        ("so it is\n42", "42", True),
        (r"\boxed{}", "42", False),
        (r"\boxed{B}", "(B) Paris", True),
        (r"\boxed{Paris}", '["Paris", "Paname"]', True),
    ],
)
def test_a_short_answer_is_the_same_words_or_the_same_number(response: str, truth: str, right: bool) -> None:
    (score,) = CrossThinkQA().score([RewardSample("r", response, truth, "t")])
    assert score.value == (1.0 if right else -1.0)


def test_rolls_length_coefficient_takes_from_short_answers() -> None:
    reward = CrossThinkQA("loose", response_length_penalty_coef=2.0)
    scores = reward.score([of_length(tokens) for tokens in (10, 100, 250, 400, 900)])
    assert [score.value for score in scores] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert reward.score([RewardSample("r", "B", "B", "t")]) == [Score(None, reason="no tokens to count")]
    assert CrossThinkQA().score([RewardSample("r", "B", None, "t")]) == [Score(None, reason="no ground truth")]


@pytest.mark.parametrize(
    ("rule", "response", "truth", "value"),
    [
        ("choice", "The answer is B", "B", 1.0),
        ("choice", "The answer is A", "B", 0.0),
        ("exact", r"\boxed{The Beatles!}", "beatles", 1.0),
        ("exact", "It may be this.\nAnswer: Beatles", "Beatles", 1.0),
        ("exact", "Beatles and others", "Beatles", 0.0),
        ("exact", "anything", "", 0.0),
        ("exact", "答案是北京。", "北京", 1.0),
        ("exact", "Ｐａｒｉｓ", "Paris", 1.0),
        ("exact", "Paris", '["Lutetia", "Paris"]', 1.0),
        ("contains", "I listen to The  Beatles.", "the beatles", 1.0),
        ("contains", "to concatenate", "cat", 0.0),
        ("contains", "我住在北京市", "北京", 1.0),
        ("contains", "<think>Paris</think> Rome", "Paris", 0.0),
        ("regex", "it is 2024-05-01.", r"\d{4}-\d\d-\d\d", 1.0),
        ("regex", "it is May.", r"\d{4}-\d\d-\d\d", 0.0),
        ("number", "The answer is 1,234.50 dollars of 2,000", "1234.5", 1.0),
        ("number", r"\boxed{x = 3/4}", "0.75", 1.0),
        ("number", "first 3, then 4", "4", 1.0),
        ("number", "10-4", "4", 1.0),
        ("number", "about -4", "4", 0.0),
        ("number", "none", "4", 0.0),
        ("f1", "Answer: the red car", "a red bus", 0.5),
        ("f1", "Answer: red bus", "the red bus", 1.0),
        ("f1", "Answer: blue", "red", 0.0),
    ],
)
def test_named_rules_score_short_answers(rule: str, response: str, truth: str, value: float) -> None:
    (score,) = GeneralRule(rule).score([RewardSample("r", response, truth, "t")])
    assert score.value == value


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    answer, gold = "a b b c", "b b b d e"
    precision, recall = 2 / 4, 2 / 5
    assert f1(answer, gold) == pytest.approx(2 * precision * recall / (precision + recall))
    assert f1("", "") == 0.0


def test_what_is_normalised_and_how_near_a_number_must_be_is_the_users_choice() -> None:
    sample = RewardSample("r", "Answer: The Cat", "cat", "t")
    assert [
        GeneralRule("exact", normalize).score([sample])[0].value for normalize in (["case"], ["case", "articles"])
    ] == [
        0.0,
        0.0,
    ]
    assert GeneralRule("exact", ["case", "articles", "spaces"]).score([sample])[0].value == 1.0
    third = RewardSample("r", "0.333", "1/3", "t")
    assert [GeneralRule("number", tolerance=near).score([third])[0].value for near in (0.0, 0.01)] == [0.0, 1.0]


def test_rows_that_cannot_be_judged_and_patterns_that_do_not_end() -> None:
    assert GeneralRule("exact").score([RewardSample("r", "a", None, "t")]) == [Score(None, reason="no ground truth")]
    assert GeneralRule("number").score([RewardSample("r", "4", "four", "t")]) == [
        Score(None, reason="ground truth is not a number")
    ]
    (unreadable,) = GeneralRule("regex").score([RewardSample("r", "a", "(", "t")])
    assert unreadable == Score(None, reason="ground truth is not a regular expression")
    (endless,) = GeneralRule("regex").score([RewardSample("r", "a" * 99_999 + "c", "(a|aa)+$", "t")])
    assert isinstance(endless, Failure)
    assert (endless.kind, f"more than {SECONDS} s on 100000 characters" in endless.message) == ("timeout", True)


@pytest.mark.parametrize(
    ("worker", "arguments", "message"),
    [
        ("crossthinkqa", {"reward_type": "kind"}, "reward_type is 'kind'; write one of loose, soft, strict"),
        ("crossthinkqa", {"response_length_penalty_coef": "1"}, "response_length_penalty_coef is '1'; write a number"),
        ("general_rule", {"rule": "near"}, "rule is 'near'; write one of choice, exact, contains, f1, regex, number"),
        ("general_rule", {"normalize": "case"}, r"normalize is 'case'; write a list, such as \[case, spaces\]"),
        ("general_rule", {"normalize": ["caps"]}, "normalize is 'caps'; write one of width, case"),
        ("general_rule", {"tolerance": -1}, "tolerance is -1; write a number of at least 0"),
        ("general_rule", {"rules": "exact"}, "cannot be created with"),
    ],
)
def test_wrong_arguments_are_named(worker: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve(worker, arguments)
