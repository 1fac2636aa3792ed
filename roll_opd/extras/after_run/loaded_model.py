"""A model in transformers that answers conversations, and the reverse KL between two models' tokens.

Legend: T tokens of a sequence, R tokens of an answer, V vocabulary columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from roll_opd.config.plan import DataPlan, SamplingPlan
from roll_opd.data.templates import load_tokenizer
from roll_opd.data.usable_rows import encode, render_row
from roll_opd.models.stop_tokens import stop_tokens
from roll_opd.pipelines.session_arguments import row_of


@dataclass(frozen=True)
class AnswerTokens:
    """Token ids of a prompt and of the answer to it."""

    prompt: list[int]
    tokens: list[int]


class LoadedModel:
    """A model and its tokenizer, on a GPU if there is one."""

    def __init__(self, path: Path, data: DataPlan) -> None:
        """Load the model; `data` has the templates of its prompts."""
        self.path, self.data = path, data
        self.tokenizer: Any = load_tokenizer(str(path))
        logging.disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device).eval()
        self.stops = sorted(stop_tokens(path, {}).ids)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, rendered as in training.

        Without a chat template, they are those of its last message.
        """
        is_chat = self.data.template != "native" or self.tokenizer.chat_template
        row = row_of(messages if is_chat else str(messages[-1]["content"]), "question", self.data)
        tokens, *_ = next(encode(self.tokenizer, [render_row(self.tokenizer, row, self.data)]))
        return [int(token) for token in tokens]

    def answer(self, messages: Sequence[Mapping[str, Any]], sampling: SamplingPlan, seed: int) -> AnswerTokens:
        """Return the model's answer to a conversation."""
        prompt = self.prompt(messages)
        torch.manual_seed(seed)
        how: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            top_k = max(0, sampling.top_k)
            how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k}
        ids_T = torch.tensor([prompt], device=self.model.device)
        given = {"eos_token_id": self.stops or None, "pad_token_id": self.stops[0] if self.stops else None}
        with torch.no_grad():
            found = self.model.generate(
                ids_T,
                attention_mask=torch.ones_like(ids_T),
                max_new_tokens=sampling.max_new_tokens,
                repetition_penalty=sampling.repetition_penalty,
                **how,
                **given,
            )
        return AnswerTokens(prompt, found[0, len(prompt) :].tolist())

    def logprobs(self, answer: AnswerTokens) -> Tensor:
        """Return the log-probs of every token at each position of an answer, f32 [R, V]."""
        ids_T = torch.tensor([[*answer.prompt, *answer.tokens]], device=self.model.device)
        with torch.no_grad():
            logits_TV = self.model(ids_T).logits[0, len(answer.prompt) - 1 : -1]
        return logits_TV.float().log_softmax(-1).cpu()

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token, "" for special tokens. Together they are the text of all.

        A character of several tokens belongs to its last token.
        """
        texts, before = [], ""
        for end in range(1, len(tokens) + 1):
            whole = self.text(tokens[:end])
            if whole.endswith("\N{REPLACEMENT CHARACTER}"):  # the character is not complete
                whole = before
            texts.append(whole[len(before) :])
            before = whole
        return texts


def reverse_kl_of(student_RV: Tensor, teacher_RV: Tensor) -> list[float]:
    """Return KL(student ‖ teacher) at each position, in nats, over the tokens that both models have.

    Models pad their vocabularies differently; the padding has no tokens.
    """
    size = min(student_RV.shape[-1], teacher_RV.shape[-1])
    log_p, log_q = (logprobs_RV[:, :size].log_softmax(-1) for logprobs_RV in (student_RV, teacher_RV))
    return [float(kl) for kl in (log_p.exp() * (log_p - log_q)).sum(-1)]
