"""Views of teachers with other tokenizers: the teacher's input, and its log-probs of the student's tokens."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tokenizer_kinds import EVERY_BYTE, KINDS, content
from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from roll_opd.base.failures import RunError
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, TeacherPlan
from roll_opd.data.row_formats import Row
from roll_opd.data.templates import load_tokenizer, render_prompt, tokenize
from roll_opd.models.token_bytes import ByteEncoder
from roll_opd.samples.byte_alignment import NO_CHUNK
from roll_opd.samples.sample import Sample
from roll_opd.teachers.other_tokenizer import OtherTokenizer, TurnMarkup, turn_markup
from roll_opd.teachers.scoring import ENOUGH, Coverage, Scorers, Teacher, coverage_checks
from roll_opd.teachers.teacher_interface import LOGPROBS, Target, TeacherAnswer, TokenSequence, Wanted
from roll_opd.teachers.views import tokenizer_content, turn_end_token, view_of

WORKER = MegatronPlan("", ModelPlan(""), (0,), Layout(), MicroBatchLimits())
TEXT = "347+589=936, naïve 東京 🙂!\r\nThe end."


def view(student: str, teacher: str, name: str = "t", **options: TurnMarkup) -> OtherTokenizer:
    one, other = ByteEncoder(content(student)), ByteEncoder(content(teacher))
    ends = {one.table.added["<|end|>"]: other.table.added["</s>"]}
    return OtherTokenizer(name, one.table, other, ends, **options)


def sample_of(tokens: Sequence[int], mask: Sequence[bool] | None = None, teachers: Sequence[str] = ("t",)) -> Sample:
    acts = np.ones(len(tokens), bool) if mask is None else np.array(mask)
    return Sample(
        np.array([0, *tokens], np.int64),
        1,
        {"action_mask": acts, "rollout_logprobs": np.full(len(tokens), -0.5, np.float32)},
        teacher_prompts={name: np.array([7, 8]) for name in teachers},
        tag="",
    )


def answer_of(found: OtherTokenizer, sample: Sample) -> tuple[np.ndarray, TeacherAnswer]:
    """Return the teacher's response tokens, and an answer with a log-prob of -1, -2, ... for each."""
    tokens, prompt_length = found.reads(sample)
    assert prompt_length == 2 and tokens[:2].tolist() == [7, 8]
    logprobs = -np.arange(1, len(tokens) - 1).astype(np.float32)
    return tokens[2:], found.back(sample, TeacherAnswer(logprobs))


@pytest.mark.parametrize("kind", EVERY_BYTE)
def test_the_same_tokenizer_reads_the_same_tokens_and_returns_the_same_bits(kind: str) -> None:
    found = view(kind, kind)
    ids, _ = found.encoder.encode(TEXT.encode())
    sample = sample_of([*ids, found.encoder.table.added["<|end|>"]])
    tokens, answer = answer_of(found, sample)
    assert tokens.tolist() == [*ids, found.encoder.table.added["</s>"]]
    assert answer.logprobs.tolist() == (-np.arange(1, len(tokens) + 1).astype(np.float32)).tolist()
    assert answer.alignment is not None and answer.alignment.chunks.tolist() == list(range(len(tokens)))


def test_special_tokens_match_by_role_then_by_text_and_else_have_no_credit() -> None:
    found = view("byte_level", "unigram")
    added = found.student.added
    ids, _ = ByteEncoder(content("byte_level")).encode(b"<think>ab</think>")
    assert ids[0] == added["<think>"]  # not special, so text
    assert added["<|start|>"] in found.student.special
    tokens, answer = answer_of(found, sample_of([added["<s>"], *ids, added["<|end|>"]]))
    theirs = found.encoder.table.added
    assert tokens[0] == theirs["<s>"] and tokens[1] == theirs["<think>"] and tokens[-1] == theirs["</s>"]
    assert answer.alignment is not None and answer.alignment.uncovered == 0
    alone = OtherTokenizer("t", found.student, found.encoder, {})
    del theirs["<|start|>"]
    tokens, answer = answer_of(alone, sample_of([added["<|start|>"], *ids]))
    assert answer.alignment is not None and answer.alignment.chunks[:2].tolist() == [NO_CHUNK, 1]
    assert np.isnan(answer.logprobs[0]) and tokens[0] == theirs["<think>"]


def test_ordinary_tokens_that_spell_a_special_token_stay_text() -> None:
    found = view("bytes_only", "llama")
    ids = [found.student.by_id.index(bytes([byte])) for byte in b"<|end|>x</s>"]
    tokens, answer = answer_of(found, sample_of(ids))
    assert not found.encoder.table.special.intersection(tokens.tolist())
    assert found.encoder.table.bytes_of(tokens.tolist()) == b"<|end|>x</s>"
    assert np.isfinite(answer.logprobs).all()


@pytest.mark.parametrize(
    "data", ["🙂".encode()[:2], "a🙂b".encode(), b"a\xff\xfeb", "é".encode()[1:], b"a\r\nb", b" a"]
)
@pytest.mark.parametrize("teacher", ["byte_level", "llama", "unigram_bytes"])
def test_parts_of_characters_and_line_ends_are_scored_as_bytes(data: bytes, teacher: str) -> None:
    found = view("bytes_only", teacher)
    ids = [found.student.by_id.index(bytes([byte])) for byte in data]
    tokens, answer = answer_of(found, sample_of(ids))
    assert found.encoder.table.bytes_of(tokens.tolist()) == data
    assert answer.alignment is not None and answer.alignment.uncovered == 0
    assert answer.logprobs.sum() == pytest.approx(-sum(range(1, len(tokens) + 1)))


@pytest.mark.parametrize(("bos_of_student", "bos_of_teacher"), [(False, True), (True, False)])
def test_a_beginning_of_sequence_token_on_one_side_only_moves_no_log_prob(
    tmp_path: Path, bos_of_student: bool, bos_of_teacher: bool
) -> None:
    """The prompts are tokenised from files of both tokenizers; the log-prob of each token must stay at its bytes."""
    tokenizers, found = [], view("byte_level", "llama")
    for kind, has_bos in (("byte_level", bos_of_student), ("llama", bos_of_teacher)):
        core = Tokenizer.from_str(json.dumps(content(kind)))
        bos = core.token_to_id("<s>")
        if has_bos:
            core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
        made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
        made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
        made.save_pretrained(tmp_path / kind)
        tokenizers.append((load_tokenizer(str(tmp_path / kind)), has_bos, bos))
    row = Row("r", messages=(FrozenDict({"role": "user", "content": "347+589"}),), tag="")
    prompts = []
    for tokenizer, has_bos, bos in tokenizers:
        (ids,) = tokenize(tokenizer, [render_prompt(tokenizer, row, "native")])
        assert ids.count(bos) == has_bos and (ids[0] == bos) == has_bos
        prompts.append(np.array(ids, np.int64))
    response, _ = ByteEncoder(content("byte_level")).encode(TEXT.encode())
    plain = sample_of(response)
    sample = Sample(
        np.concatenate([prompts[0], np.array(response, np.int64)]),
        len(prompts[0]),
        {"action_mask": plain.action_mask, "rollout_logprobs": plain.rollout_logprobs},
        teacher_prompts={"t": prompts[1]},
        tag="",
    )
    tokens, prompt_length = found.reads(sample)
    assert tokens[:prompt_length].tolist() == prompts[1].tolist()
    expected_tokens, expected = answer_of(found, plain)
    assert tokens[prompt_length:].tolist() == expected_tokens.tolist()
    logprobs = -np.arange(1, len(expected_tokens) + 1).astype(np.float32)
    assert found.back(sample, TeacherAnswer(logprobs)).logprobs.tolist() == expected.logprobs.tolist()
    assert np.isfinite(expected.logprobs).all()


@pytest.mark.parametrize(
    ("template", "end"),
    [("{{ m.content + '\n' }}", b"\n"), ("{{ m.content + '</s>\n' }}", b"</s>"), ("{{ m.content }}", b"</s>")],
)
@pytest.mark.parametrize("kind", ["byte_level", "gemma"])
def test_a_newline_ends_a_turn_if_the_template_writes_nothing_else(
    tmp_path: Path, kind: str, template: str, end: bytes
) -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content(kind))), eos_token="</s>")
    made.chat_template = "{%- for m in messages -%}" + template + "{%- endfor -%}"
    made.save_pretrained(tmp_path)
    encoder = ByteEncoder(content(kind))
    token = turn_end_token(tmp_path, encoder)
    assert token is not None and encoder.table.by_id[token] == end


def test_an_answer_begins_with_the_tokens_of_the_whole_conversation() -> None:
    """After a special token, some tokenizers add a space to a text."""
    texts, spaced = ("The sum of 347", " 12 and 30", "a", "\n\nThere", "<think>\nFirst"), set()
    for kind in KINDS:
        encoder, whole = ByteEncoder(content(kind)), Tokenizer.from_str(json.dumps(content(kind)))
        before = encoder.table.added["</s>"]
        for text in texts:
            tokens, ends = encoder.encode_after(before, text.encode())
            expected = whole.encode(f"</s>{text}", add_special_tokens=False).ids[1:]
            if "<think>" in text:  # the text after it is in the middle of an answer
                tokens, expected = tokens[:1], expected[:1]
            elif encoder.table.bytes_of(expected).strip() != text.encode().strip():
                continue  # normalisation changes its bytes
            assert tokens == expected, (kind, text)
            assert ends[-1] == len(text) and (np.diff(ends) >= 0).all()
            spaced |= {kind} if encoder.table.bytes_of(tokens) == b" " + text.encode() else set()
    assert {"llama", "unigram", "unigram_bytes"} <= spaced and not spaced & {"byte_level", "mistral", "gemma"}


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|im_start|>assistant\n"


def test_an_observed_turn_is_read_in_the_teachers_template_and_has_no_credit() -> None:
    ours = TurnMarkup({"user": ("<|end|>\n<|start|>user\n", "<|end|>\n<|start|>assistant\n")}, "<|end|>")
    theirs = TurnMarkup({"user": ("</s> [INST] ", " [/INST]")}, "</s>")
    found = view("byte_level", "llama", student_turns=ours, teacher_turns=theirs)
    encode, added = ByteEncoder(content("byte_level")), found.student.added
    first, second = encode.encode(b"Done! the")[0], encode.encode(b"sum is 936.")[0]
    observed = encode.encode_markup("\n<|start|>user\nAnd 1+1?<|end|>\n<|start|>assistant\n")
    ids = [*first, added["<|end|>"], *observed, *second, added["<|end|>"]]
    mask = [True] * (len(first) + 1) + [False] * len(observed) + [True] * (len(second) + 1)
    tokens, answer = answer_of(found, sample_of(ids, mask))
    text = found.encoder.table.bytes_of(tokens.tolist()).decode()
    assert text == "Done! the</s> [INST] And 1+1? [/INST]sum is 936.</s>"
    assert tokens.tolist().count(found.encoder.table.added["</s>"]) == 2
    assert answer.alignment is not None
    assert (answer.alignment.chunks == NO_CHUNK).tolist() == [not acts for acts in mask]


def test_a_tool_call_has_credits_and_the_tools_turn_is_read_in_the_teachers_template() -> None:
    """The student writes the tags in several tokens; in the teacher's tokenizer each is one added token."""
    tags = Tokenizer.from_str(json.dumps(content("llama")))
    tags.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    other = ByteEncoder(json.loads(tags.to_str()))
    encode = ByteEncoder(content("byte_level"))
    added, theirs = encode.table.added, other.table.added
    ours = TurnMarkup({"tool": ("<|end|>\n<|start|>tool\n", "<|end|>\n<|start|>assistant\n")}, "<|end|>")
    turns = TurnMarkup({"tool": ("</s> [TOOL] ", " [/TOOL]")}, "</s>")
    found = OtherTokenizer("t", encode.table, other, {added["<|end|>"]: theirs["</s>"]}, ours, turns)
    call, answer = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "It is 2."
    first, second = (encode.encode(text.encode())[0] for text in (call, answer))
    result = encode.encode_markup("\n<|start|>tool\n2.0<|end|>\n<|start|>assistant\n")
    ids = [*first, added["<|end|>"], *result, *second, added["<|end|>"]]
    mask = [True] * (len(first) + 1) + [False] * len(result) + [True] * (len(second) + 1)
    tokens, scored = answer_of(found, sample_of(ids, mask))
    assert other.table.bytes_of(tokens.tolist()).decode() == f"{call}</s> [TOOL] 2.0 [/TOOL]{answer}</s>"
    assert tokens[0] == theirs["<tool_call>"] and (tokens == theirs["</tool_call>"]).sum() == 1
    assert scored.alignment is not None and scored.alignment.uncovered == 0
    assert np.isfinite(scored.logprobs).tolist() == mask
    opening = scored.alignment.cuts()[0]
    assert opening[:2] == (0, len(encode.encode(b"<tool_call>")[0])) and opening[2] == [b"<tool_call>"]


def test_markup_of_a_template_is_found_by_rendering_it() -> None:
    def render(messages: Sequence[dict[str, str]]) -> str:
        if messages[-1]["role"] == "tool":
            raise ValueError("no tools")
        turns = "".join(f"<{m['role']}>{m['content']}<end>" for m in messages)
        return turns + "<assistant>"

    found = turn_markup(render, "<end>")  # type: ignore[arg-type]
    assert found.around == {"user": ("<end><user>", "<end><assistant>")}
    turn = found.split(b"<user>4 times?<end><assistant>", ended=True)
    assert turn is not None and (turn.role, turn.content) == ("user", b"4 times?")
    assert found.split(b"<user>4 times?<end><user>5?<end><assistant>", ended=True) is None


def test_a_sample_without_the_teachers_prompt_or_with_a_wrong_answer_is_refused() -> None:
    found = view("byte_level", "llama")
    with pytest.raises(RunError, match="no prompt for teacher t"):
        found.reads(sample_of([5, 6], teachers=()))
    with pytest.raises(RunError, match="log-probs of shape"):
        found.back(sample_of([5, 6]), TeacherAnswer(np.zeros(77, np.float32)))


def test_a_view_is_made_from_the_files_of_both_models() -> None:
    """The demo's student, and its teacher of another BPE, other special tokens and another template."""
    models = Path(__file__).parents[2] / "examples/demo/models"
    other = str(models / "other_tokenizer")
    plan = TeacherPlan("t", replace(WORKER, model=ModelPlan(other)), 1.0, tokenizer=other)
    found = view_of(plan, ModelPlan(str(models / "student")))
    assert isinstance(found, OtherTokenizer)
    ours, theirs = found.student.added, found.encoder.table.added
    assert found.ends == {ours["<|end|>"]: theirs["</s>"]}
    assert found.student_turns.around["user"] == ("<|end|><|user|>", "<|end|><|assistant|>")
    assert found.teacher_turns.around["user"] == ("</s>[Q]", "</s>[A]")
    work = ByteEncoder(tokenizer_content(models / "student"))
    ids, observed = work.encode(b"7+9+0=16\n936")[0], work.encode_markup("<|user|>1+1=<|end|><|assistant|>")
    tokens, answer = answer_of(
        found,
        sample_of(
            [*ids, ours["<|end|>"], *observed, *ids],
            [True] * (len(ids) + 1) + [False] * len(observed) + [True] * len(ids),
        ),
    )
    text = found.encoder.table.bytes_of(tokens.tolist()).decode()
    assert text == "7+9+0=16\n936</s>[Q]1+1=</s>[A]7+9+0=16\n936"
    assert {theirs["[Q]"], theirs["[A]"]} < set(tokens.tolist())
    assert answer.alignment is not None and answer.alignment.uncovered == 0
    assert all(b"".join(pieces).decode() in text for _, _, pieces in answer.alignment.cuts() if pieces != [b"<|end|>"])
    assert [count for _, count, _ in answer.alignment.cuts()][:3] == [1, 2, 2]  # 7, +9, +0


@dataclass(frozen=True)
class BySum:
    """A scorer with the log-prob -id / 1000 for each token."""

    name: str
    targets: frozenset[Target] = frozenset()
    is_exact: bool = True

    async def score(
        self, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        return [TeacherAnswer((-tokens[length:] / 1000).astype(np.float32)) for tokens, length in sequences]

    def drain_metrics(self) -> dict[str, float]:
        return {}

    def end(self) -> None:
        pass


def test_teachers_of_several_tokenizers_score_the_same_samples() -> None:
    names = ("llama", "unigram_bytes", "digits")
    teachers = [Teacher(TeacherPlan(n, WORKER, 1.0), BySum(n), view("byte_level", n, n)) for n in names]
    ids, _ = ByteEncoder(content("byte_level")).encode(TEXT.encode())
    samples = [sample_of(ids[: 5 + number], teachers=names) for number in range(4)]
    scored = asyncio.run(Scorers(teachers).compute_logprobs(samples, 1.0))
    for sample in scored:
        assert list(sample.teacher_logprobs) == list(sample.alignments) == list(names)
        for teacher in teachers:
            tokens, length = teacher.view.reads(sample)
            total = sample.teacher_logprobs[teacher.plan.name].sum()
            assert total == pytest.approx(-tokens[length:].sum() / 1000, rel=1e-5)


def test_a_run_with_more_than_a_twentieth_uncovered_is_refused() -> None:
    found = view("bytes_only", "unigram")
    ids = [found.student.by_id.index(bytes([byte])) for byte in "abcΞ".encode() * 4]
    sample = sample_of(ids)
    answer = answer_of(found, sample)[1]
    assert answer.alignment is not None and 0 < answer.alignment.uncovered < len(ids)
    scored = Sample(sample.tokens, 1, sample.columns, alignments={"t": answer.alignment})
    assert [row.verdict for row in coverage_checks([scored], "t")] == ["ok", "ok", "failed"]
    counted = Coverage()
    counted.add([scored])  # too few tokens for a verdict
    with pytest.raises(RunError, match="scores too little"):
        counted.add([scored] * (ENOUGH // len(ids)))


def test_a_token_takes_less_than_twenty_microseconds() -> None:
    found = view("byte_level", "llama")
    ids, _ = ByteEncoder(content("byte_level")).encode((TEXT * 20).encode())
    taken = []
    for number in range(5):
        sample = sample_of([*ids, *ids[:number]])
        start = time.perf_counter()
        answer_of(found, sample)
        taken.append((time.perf_counter() - start) / len(ids))
    assert min(taken) < 20e-6
