"""A small real tokenizer: byte-level BPE with a chat template, saved and loaded like a user's tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from roll_opd.config.plan import DataPlan
from roll_opd.data.data_checks import DataReport
from roll_opd.data.dataset import Prompt, open_prompts
from roll_opd.data.templates import load_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(["what is 2+2 and how many are they"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tokenizer_dir))


@pytest.fixture(scope="session")
def opened(tokenizer: PreTrainedTokenizerBase) -> Callable[..., tuple[list[Prompt], DataReport]]:
    """Open files as a data set; `options` are those of `DataPlan`."""

    def open_files(*files: Path, **options: object) -> tuple[list[Prompt], DataReport]:
        plan = DataPlan(**{"files": tuple(map(str, files)), "prompt_length": 64, **options})
        prompts, report = open_prompts(plan, tokenizer)
        return prompts.all(), report

    return open_files
