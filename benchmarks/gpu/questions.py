"""The questions that a card answers, most important first: one command each, at most `LIMIT` seconds.

`python -m benchmarks.gpu` runs them. Commands are files of benchmarks/ with arguments. Those of `on_cpu` replace the
arguments where there is no card: the same code with tiny models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LIMIT = 120.0  # seconds of a command
CPU = "--device cpu"
RATES = "rates"  # the question whose answers replace {flops} and {bytes} in commands

MEASURE, GENERATION, LOOP, SYNC = "gpu/measure.py", "gpu/generation.py", "gpu/large.py", "weight_sync.py"
SPEED = "--shapes 0.6B --parts train teacher --peak-tflops {tflops}"
TINY_SPEED = f"{CPU} --shapes tiny --parts train teacher --peak-tflops {{tflops}}"
STEPS = "--no-bare --rates {flops} {bytes}"
SMALL_LOOP = (
    f"{CPU} --student small --teachers small {STEPS} --steps 2 --warmup 1 rollout_batch_size=4 response_length=12"
    " student_train.training_args.per_device_train_batch_size=16"
    " student_train.training_args.gradient_accumulation_steps=1"
)
SMALL_ENGINES = f"{CPU} --shape small --prompts 4 --tokens 24"
ADAPTER = "++student_train.model_args.lora_target=all-linear ++student_train.model_args.lora_rank=16"
SYNC_MODEL = "--megabytes 2400 --times 6 num_gpus_per_node={} student_train.device_mapping=[0]"
ENGINE = "++student_infer.strategy_args.strategy_config"
ONE_CARD = (
    f"{SYNC_MODEL.format(1)} student_infer.device_mapping=[0] teacher.device_mapping=[0]"
    " student_train.model_args.dtype=bf16 student_infer.model_args.dtype=bf16 teacher.model_args.dtype=bf16"
    f" {ENGINE}.gpu_memory_utilization=0.3 {ENGINE}.kv_cache_memory_bytes=1073741824"
)
TWO_CARDS = ONE_CARD.replace(SYNC_MODEL.format(1), SYNC_MODEL.format(2)).replace(
    "student_infer.device_mapping=[0]", "student_infer.device_mapping=[1]"
)
SMALL_SYNC = "--megabytes 8 --times 2"
CARD = "examples/cards"
FEW = "rollout_batch_size=8 student_train.training_args.gradient_accumulation_steps=2"


@dataclass(frozen=True)
class Question:
    """A question, the command that answers it, and the figures of its record that are shown."""

    asks: str
    file: str
    on_card: str
    on_cpu: str
    figures: tuple[str, ...]  # paths in the record; * stands for every key
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages
    cards: int = 1


def _layers(is_te: int) -> dict[str, str]:
    return {"ROLL_OPD_TRANSFORMER_ENGINE": str(is_te)}


def _attention(kernel: str) -> dict[str, str]:
    return {"ROLL_OPD_FLASH_ATTENTION": kernel, **_layers(0)}


TOKENS = ("*.train.tokens_a_second", "*.teacher.tokens_a_second", "*.train.peak_bytes")
ERRORS = ("*.numerics.*.logprob_mean", "*.numerics.*.fast_mean", "*.numerics.*.theirs_mean")
ENGINES = ("variants.*.start_seconds", "variants.*.tokens_a_second", "variants.*.mean_difference", "variants.*.failed")
STEP = ("runs.*.step.seconds", "runs.*.phases.*.seconds", "runs.*.startup_seconds", "runs.*.device_memory_gib")
SENT = ("gigabytes_a_second", "seconds")

QUESTIONS: dict[str, Question] = {
    RATES: Question(
        "matrix rate and memory bandwidth", "machine_rates.py", "--dtype bf16", "--dtype fp32", ("flops", "bytes")
    ),
    "numerics": Question(
        "log-probs, losses and gradients against Hugging Face, fp32 and bf16",
        MEASURE,
        "--shapes tiny --parts numerics --peak-tflops {tflops}",
        f"{CPU} --shapes tiny --parts numerics --dtypes fp32 --peak-tflops {{tflops}}",
        ERRORS,
        _layers(0),
    ),
    "numerics-te": Question(
        "numerics with Transformer Engine's layers, bf16",
        MEASURE,
        "--shapes tiny --parts numerics --dtypes bf16 --peak-tflops {tflops}",
        f"{CPU} --shapes tiny --parts numerics --dtypes bf16 --peak-tflops {{tflops}}",
        ERRORS,
        _layers(1),
        ("transformer-engine-torch",),
    ),
    "loop-1k": Question(
        "a step of 0.6B with a 1.7B teacher, answers of 1,024 tokens",
        LOOP,
        f"{STEPS} --teachers 1.7B --steps 3 --warmup 1 rollout_batch_size=32 response_length=1024"
        " student_train.training_args.gradient_accumulation_steps=2",
        SMALL_LOOP,
        STEP,
    ),
    "graphs": Question(
        "CUDA graphs in the engine against eager",
        GENERATION,
        "--variants eager graphs",
        f"{SMALL_ENGINES} --variants eager",
        ENGINES,
    ),
    "fp8": Question(
        "an engine in FP8, and with an FP8 cache: tokens per second and mismatch",
        GENERATION,
        "--variants fp8 fp8_kv",
        f"{SMALL_ENGINES} --variants fp8 fp8_kv",
        ENGINES,
    ),
    "card24-full": Question(
        "0.6B with a 4B teacher in 24 GiB, roles in turn",
        LOOP,
        f"{STEPS} --config {CARD}/card_24gb --memory 24 --teachers 4B --steps 2 --warmup 1 {FEW}",
        f"{SMALL_LOOP} --config {CARD}/card_24gb",
        STEP,
    ),
    "card24-lora": Question(
        "1.7B with LoRA and an 8B teacher in 24 GiB, adapters in the engine",
        LOOP,
        f"{STEPS} --config {CARD}/card_24gb_lora --memory 24 --student 1.7B --teachers 8B --steps 2 --warmup 1 {FEW}",
        f"{SMALL_LOOP} --config {CARD}/card_24gb_lora",
        STEP,
    ),
    "ipc": Question("weights by CUDA handles, in buckets", SYNC, ONE_CARD, f"{SMALL_SYNC}", SENT),
    "adapter": Question(
        "LoRA's weights as an adapter",
        SYNC,
        f"{ONE_CARD} {ADAPTER} ++lora_sync=adapter",
        f"{SMALL_SYNC} {ADAPTER} ++lora_sync=adapter",
        SENT,
    ),
    "nccl-one-card": Question(
        "a broadcast between two processes on one card",
        "gpu/broadcast.py",
        "--backend nccl",
        "--backend gloo --megabytes 8",
        ("gigabytes_a_second", "refused"),
    ),
    "nccl": Question("weights over NCCL, on two cards", SYNC, TWO_CARDS, SMALL_SYNC, SENT, cards=2),
    "loop-4k": Question(
        "loop-1k with answers of 4,096 tokens",
        LOOP,
        f"{STEPS} --teachers 1.7B --steps 2 --warmup 1 rollout_batch_size=8 response_length=4096"
        " student_train.training_args.gradient_accumulation_steps=1"
        " student_train.training_args.per_device_train_batch_size=32",
        SMALL_LOOP,
        STEP,
    ),
    "speed": Question(
        "update and scoring, local layers with torch's attention", MEASURE, SPEED, TINY_SPEED, TOKENS, _layers(0)
    ),
    "speed-te": Question(
        "update and scoring with Transformer Engine's layers",
        MEASURE,
        SPEED,
        TINY_SPEED,
        TOKENS,
        _layers(1),
        ("transformer-engine-torch",),
    ),
    "speed-flash2": Question(
        "update and scoring, local layers with flash-attn 2",
        MEASURE,
        SPEED,
        TINY_SPEED,
        TOKENS,
        _attention("flash2"),
        ("flash-attn",),
    ),
    "speed-flash3": Question(
        "update and scoring, local layers with flash attention 3",
        MEASURE,
        SPEED,
        TINY_SPEED,
        TOKENS,
        _attention("flash3"),
        ("flash-attn-3",),
    ),
    "speculation": Question(
        "n-gram speculation, answers that repeat themselves",
        GENERATION,
        "--variants graphs ngram --repeats --temperature 0.02",
        f"{SMALL_ENGINES} --variants eager ngram --repeats --temperature 0.02",
        (*ENGINES, "variants.*.accepted", "variants.*.drafted"),
    ),
    "loop-2k": Question(
        "loop-1k with answers of 2,048 tokens",
        LOOP,
        f"{STEPS} --teachers 1.7B --steps 2 --warmup 1 rollout_batch_size=16 response_length=2048"
        " student_train.training_args.gradient_accumulation_steps=1",
        SMALL_LOOP,
        STEP,
    ),
    "delta": Question(
        "the gated delta rule's kernels",
        "gpu/delta_kernels.py",
        "",
        f"{CPU} --tokens 256 --width 16 --heads 2",
        ("speed.*",),
    ),
}
