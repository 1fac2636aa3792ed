"""Special tokens around a text, for several families of tokenizers, against lists written by hand."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from roll_opd.base.frozen import FrozenDict
from roll_opd.data.row_formats import Row
from roll_opd.data.templates import (
    TEMPLATES,
    added_bos,
    load_tokenizer,
    render_answer,
    render_prompt,
    token_ids,
    tokenize,
)

BOS, EOS, A, B = 0, 1, 2, 3
WITH_BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
WITH_EOS = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
WITH_BOTH = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)])
IN_SEQUENCE = processors.Sequence([processors.ByteLevel(trim_offsets=False), WITH_BOTH])


def _made(directory: Path, processor: object = None, **settings: object) -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": BOS, "</s>": EOS, "a": A, "b": B, "[CLS]": 4, "[SEP]": 5}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="b"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor:
        core.post_processor = processor
    settings = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    PreTrainedTokenizerFast(tokenizer_object=core, **settings).save_pretrained(directory)
    return load_tokenizer(str(directory))


@pytest.mark.parametrize(
    ("processor", "settings", "bos"),
    [
        (None, {}, None),  # as Qwen's
        (WITH_BOS, {}, BOS),  # as Gemma's
        (WITH_EOS, {}, None),
        (WITH_BOTH, {}, BOS),
        (IN_SEQUENCE, {}, BOS),  # as Llama 3's
        (None, {"add_bos_token": True}, BOS),
        (None, {"add_bos_token": True, "add_eos_token": True}, BOS),
        (None, {"add_eos_token": True}, None),
        (WITH_BOTH, {"add_bos_token": False, "add_eos_token": True}, None),
        (WITH_BOS, {"bos_token": None}, None),
        (WITH_BOTH, {"bos_token": "</s>"}, None),  # its BOS is what ends a text, and it puts another one before
        (
            processors.TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", EOS)]),
            {"bos_token": "</s>"},
            EOS,
        ),
        (processors.BertProcessing(("[SEP]", 5), ("[CLS]", 4)), {"bos_token": None, "cls_token": "[CLS]"}, None),
    ],
)
def test_a_tokenizer_adds_its_bos_and_nothing_else(
    tmp_path: Path, processor: object, settings: dict, bos: int | None
) -> None:
    tokenizer = _made(tmp_path, processor, **settings)
    assert added_bos(tokenizer) == bos
    first = [] if bos is None else [bos]
    texts = ["a b", "<s> a", " <s> a", "a <s>", "</s> a"]
    whole = [[A, B], [BOS, A], [BOS, A], [A, BOS], [EOS, A]]
    expected = [ids if bos is not None and ids[0] == bos else [*first, *ids] for ids in whole]
    assert token_ids(tokenizer, texts, [None] * 5) == expected
    assert token_ids(tokenizer, texts, [""] * 5) == whole
    assert token_ids(tokenizer, texts[:2], ["", None]) == [whole[0], expected[1]]
    assert token_ids(tokenizer, [], []) == []


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("own", ["{{ bos_token }}", ""])
def test_every_template_begins_with_one_bos(tmp_path: Path, template: str, own: str) -> None:
    tokenizer = _made(tmp_path, WITH_BOTH)
    tokenizer.chat_template = own + "{% for m in messages %} {{ m.content }} {% endfor %} b"
    conversation = Row("r", messages=(FrozenDict({"role": "user", "content": "a"}),), tag="")
    plain = Row("r", prompt="a", tag="")
    for row in (conversation, plain):
        prompt = render_prompt(tokenizer, row, template)
        answer = FrozenDict({"role": "assistant", "content": "b"})
        ids, answered = tokenize(tokenizer, [prompt, render_answer(tokenizer, plain, answer, prompt, template)])
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
        assert ids[-1] != EOS
        assert BOS not in answered
