"""Stop strings that are special tokens: decoded text does not have them, so the engine stops at their ids."""

from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from roll_opd.inference.vllm_requests import stop_token_ids


def test_special_tokens_among_stop_strings() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    core.add_special_tokens(["</s>", "<|end|>"])
    core.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    assert stop_token_ids(("a", "<|end|>", "<tool>", "</s>", "x<|end|>"), tokenizer) == (3, 2)
    for stop in ("<|end|>", "<tool>"):
        shown = stop in tokenizer.decode(core.encode(f"a {stop}").ids, skip_special_tokens=True)
        assert bool(stop_token_ids((stop,), tokenizer)) != shown
