"""On-policy distillation as a plain Hugging Face loop, without a framework.

    python hf_loop.py WORK OUT     # WORK: what works.py has written; OUT: a line of figures a step

Legend: B sequences, P prompt tokens, A answer tokens, T = P + A, V vocabulary.
"""

import sys

import torch
from peer_side import Rows, greedy_answers, optimizer_of, read_work
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(work_path: str, out: str) -> None:
    work, rows = read_work(work_path), Rows(out)
    torch.manual_seed(work["seed"])
    tokenizer = AutoTokenizer.from_pretrained(work["student"])
    student = AutoModelForCausalLM.from_pretrained(work["student"], dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(work["teacher"], dtype=torch.float32)
    optimizer, schedule = optimizer_of(work, student)
    if work["held_out"]:
        rows.write(0, texts=greedy_answers(work, student, tokenizer))
    prompts, size = torch.tensor(work["prompts"]), work["prompts_per_step"]  # of one length, so no padding is needed
    for step in range(1, work["steps"] + 1):
        prompts_BP = prompts[(step - 1) * size : step * size].repeat_interleave(work["answers"], dim=0)
        with rows.part("generate"), torch.no_grad():
            tokens_BT = student.generate(
                prompts_BP,
                attention_mask=torch.ones_like(prompts_BP),
                do_sample=True,
                temperature=work["temperature"],
                top_p=work["top_p"],
                top_k=0,
                max_new_tokens=work["max_new_tokens"],
            )
        ends_BA = tokens_BT[:, prompts_BP.shape[1] :] == tokenizer.eos_token_id
        mask_BA = ends_BA.cumsum(dim=1) - ends_BA.long() == 0  # includes the end token, excludes all tokens after it
        tokens, divergence = mask_BA.sum(), 0.0
        for mask_ba, tokens_bt in zip(
            mask_BA.split(work["micro_batch"]), tokens_BT.split(work["micro_batch"]), strict=True
        ):
            kept = mask_ba.shape[1] + 1  # the logits at a position are for the next token
            with rows.part("teacher"), torch.no_grad():
                logits_bav = teacher(tokens_bt, logits_to_keep=kept).logits[:, :-1]
                teacher_bav = (logits_bav / work["temperature"]).log_softmax(dim=-1)
            with rows.part("train"):
                logits_bav = student(tokens_bt, logits_to_keep=kept).logits[:, :-1]
                student_bav = (logits_bav / work["temperature"]).log_softmax(dim=-1)
                reverse_kl_ba = (student_bav.exp() * (student_bav - teacher_bav)).sum(dim=-1)
                loss = (reverse_kl_ba * mask_ba).sum() / tokens
                loss.backward()
            divergence += loss.item()
        with rows.part("train"):
            torch.nn.utils.clip_grad_norm_(student.parameters(), work["max_grad_norm"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        texts = None
        if work["held_out"]:
            with rows.part("validate"):
                texts = greedy_answers(work, student, tokenizer)
        rows.write(step, tokens=int(tokens), loss=divergence, texts=texts)


if __name__ == "__main__":
    main(*sys.argv[1:])
