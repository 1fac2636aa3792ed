"""The same work by TRL's DistillationTrainer, as its documentation uses it.

    python trl_loop.py WORK OUT    # WORK: what works.py has written; OUT: a line of figures a step

The trainer's methods are overridden only to measure their seconds.
"""

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peer_side import Rows, greedy_answers, optimizer_of, read_work
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer


class Timed(DistillationTrainer):
    """Times the parts of a step."""

    rows: Rows

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.rows.part("generate"):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_last_hidden_state(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model is not self.teacher_model:
            return super()._get_last_hidden_state(model, *args, **kwargs)
        with self.rows.part("teacher"):
            return super()._get_last_hidden_state(model, *args, **kwargs)


class Record(TrainerCallback):
    """Writes the row of each step, with greedy answers if they are requested."""

    def __init__(self, work: dict[str, Any], trainer: Timed, tokenizer: Any) -> None:
        self.work, self.trainer, self.tokenizer = work, trainer, tokenizer

    def answers(self) -> list[str] | None:
        if not self.work["held_out"]:
            return None
        with self.trainer.rows.part("validate"):
            return greedy_answers(self.work, self.trainer.model, self.tokenizer)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.work["held_out"]:
            self.trainer.rows.write(0, texts=self.answers())

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "loss" in state.log_history[-1]:  # the last log summarises the training
            tokens = sum(int(batch["completion_mask"].sum()) for batch in self.trainer._buffered_inputs)
            row = {"tokens": tokens, "loss": state.log_history[-1]["loss"], "texts": self.answers()}
            self.trainer.rows.write(state.global_step, **row)


def main(work_path: str, out: str) -> None:
    work, rows = read_work(work_path), Rows(out)
    sequences = work["prompts_per_step"] * work["answers"]
    tokenizer = AutoTokenizer.from_pretrained(work["student"], padding_side="left")
    student = AutoModelForCausalLM.from_pretrained(work["student"], dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(work["teacher"], dtype=torch.float32)
    # the trainer samples one answer per row, so a prompt has as many rows as answers
    prompts = [text for text in work["texts"] for _ in range(work["answers"])]
    with tempfile.TemporaryDirectory(prefix="peers-trl-") as directory:
        trainer = Timed(
            model=student,
            teacher_model=teacher,
            args=DistillationConfig(
                output_dir=directory,
                max_steps=work["steps"],
                per_device_train_batch_size=work["micro_batch"],
                gradient_accumulation_steps=sequences // work["micro_batch"],
                max_completion_length=work["max_new_tokens"],
                temperature=work["temperature"],
                top_p=work["top_p"],
                beta=1.0,  # reverse KL
                max_grad_norm=work["max_grad_norm"],
                seed=work["seed"],
                bf16=False,
                gradient_checkpointing=False,
                shuffle_dataset=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            optimizers=optimizer_of(work, student),
        )
        trainer.rows = rows
        trainer.add_callback(Record(work, trainer, tokenizer))
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
