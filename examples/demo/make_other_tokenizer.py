"""Make a teacher for the demo's task with another tokenizer: merged tokens, other special tokens, another template.

    python examples/demo/make_other_tokenizer.py [--output DIR] [--threads N]

Like the demo's teacher it is trained on correct work, but in other tokens: BPE over bytes, with merges trained on such
work. Token ids, special tokens and chat template differ from the student's:

    student:  <|user|> 3 4 7 + 5 8 9 = <|end|> <|assistant|>
    teacher:  [Q] 3 4 7 + 5 8 9 = </s> [A]

The seeds determine the result; one run takes some minutes on an idle CPU core.
"""

import argparse
import random
from pathlib import Path

import torch
from make_assets import HERE, MAX_POSITIONS, MODELS, draw_pair, draw_splits, pretrain, question, save, worked_answer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NAME = "other_tokenizer"
SEED = 17
MERGES = 40  # merged tokens
END = "</s>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- '[Q]' + message['content'] + '</s>' -}}"
    "{%- else -%}{{- '[A]' + message['content'] + '</s>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[A]' -}}{%- endif -%}"
)


def build_merged_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with merges of frequent pairs, such as `+0=`."""
    rng = random.Random(SEED)
    pairs = [draw_pair(rng) for _ in range(500)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, max_token_length=3, show_progress=False
    )
    core.train_from_iterator([question(*pair) + worked_answer(*pair) for pair in pairs], trainer)
    core.add_special_tokens([END, "[Q]", "[A]"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=["[Q]", "[A]"],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE, help="default: this folder")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _, val_pairs = draw_splits()
    spec = {**MODELS["teacher"], "seed": SEED}
    tokenizer = build_merged_tokenizer()
    save(pretrain(NAME, spec, tokenizer, val_pairs), tokenizer, args.output / "models" / NAME)


if __name__ == "__main__":
    main()
