"""Text in the middle of a sequence has the tokens that it has in the whole text, for every form of a tokenizer."""

import random
from typing import Any

import pytest
from tokenizer_forms import random_form, random_text
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll_opd.data.templates import mid_text, token_ids

CHARACTERS = ["▁", "▁3", "▁a", *"0123456789+=ab|user\n<>", "Ġ", "Ġ3", "Ċ"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCABULARY = dict.fromkeys(["<unk>", "<s>", "</s>", *BYTES, *CHARACTERS])
VOCABULARY = {token: number for number, token in enumerate(VOCABULARY)}
BPE = models.BPE(
    vocab=VOCABULARY,
    merges=[("▁", "3"), ("▁", "a"), ("Ġ", "3")],
    unk_token="<unk>",
    byte_fallback=True,
    fuse_unk=True,
)
UNIGRAM = models.Unigram([(token, -1.0 - len(token) % 2) for token in VOCABULARY], unk_id=0, byte_fallback=True)
SPACES = normalizers.Replace(" ", "▁")
FORMS: dict[str, tuple[Any, Any, Any]] = {  # name -> model, normalizer, pre-tokenizer
    "first": (BPE, None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "always": (BPE, None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "never": (BPE, None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
    "legacy Llama": (BPE, normalizers.Sequence([normalizers.Prepend("▁"), SPACES]), None),
    "T5": (
        UNIGRAM,
        normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(left=True, right=False)]),
        pre_tokenizers.Metaspace(prepend_scheme="always", split=True),
    ),
    "Unigram": (UNIGRAM, None, pre_tokenizers.Metaspace(prepend_scheme="first", split=True)),
    "bytes with a first space": (BPE, None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "bytes": (BPE, None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
}


def made(form: str, rstrip: bool) -> Any:
    model, normalizer, splitter = FORMS[form]
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    added = [AddedToken("<unk>", special=True), AddedToken("</s>", special=True, rstrip=rstrip, normalized=False)]
    tokenizer.add_special_tokens([*added, AddedToken("<s>", special=True, normalized=False)])
    tokenizer.enable_truncation(8)  # of tokenizer.json; texts are not truncated
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_the_whole_text(form: str) -> None:
    """The texts are cut where no token crosses the cut: after a line break or after an added token."""
    draw = random.Random(form)
    for rstrip in (False, True):
        tokenizer = made(form, rstrip)
        for _ in range(200):
            parts = ["".join(draw.choices("03a+=|b \n", k=draw.randint(1, 6))) for _ in range(3)]
            before = parts[0] + draw.choice(["</s>", "<s>", "=\n", "|\n", *(["</s>\n"] * (form != "T5"))])
            text = parts[1].lstrip() + draw.choice(["</s>", "\n", ""]) + parts[2]
            if not text or (text[0].isspace() and rstrip):
                continue
            whole = token_ids(tokenizer, [before + text], [""])[0]
            found = token_ids(tokenizer, [before, text], ["", before])
            assert found[0] + found[1] == whole, (before, text)
    assert (mid_text(made(form, False)) is None) == (form in ("never", "bytes"))


def test_tokens_are_those_of_the_whole_text_for_random_forms() -> None:
    compared = 0
    for seed in range(60):
        draw = random.Random(seed)
        backend = random_form(draw)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
        for end in 3 * ("<s>", "<t>", "3\n"):
            before, text = random_text(draw, 4) + end, random_text(draw, 5)
            whole = backend.encode(before + text, add_special_tokens=False)
            first = next((n for n, (start, _) in enumerate(whole.offsets) if start >= len(before)), len(whole))
            is_cut = any(start < len(before) < stop for start, stop in whole.offsets)
            if is_cut or token_ids(tokenizer, [before], [""])[0] != whole.ids[:first]:
                continue  # a token crosses the cut, or the end of the text before is stripped
            assert token_ids(tokenizer, [text], [before])[0] == whole.ids[first:], (seed, before, text)
            compared += 1
    assert compared > 400
