"""Predicted seconds of each kernel family of a pass: the larger of its FLOPs and its bytes over the device's rates.

Counted for dense models in bf16 without Transformer Engine. Bytes are the reads and writes of the current kernels in
device memory, each tensor once per kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shapes import Shape

from roll_opd.models.flops import keys_seen

# measured: FLOP/s of a product of 8,192³ in bf16, and bytes per second of a copy (reads and writes)
H100 = (798e12, 3.0e12)
HALF, SINGLE = 2, 4  # bytes of a number
ADAMW = 28  # bytes per parameter, f32: weight and both moments read and written, gradient read
EMBEDDING_GRADIENT = 12  # bytes per parameter and micro-batch: written and read in bf16, added in f32


@dataclass(frozen=True)
class Counted:
    """FLOPs and bytes of one family."""

    flops: float = 0.0
    bytes: float = 0.0

    def seconds(self, rates: tuple[float, float]) -> float:
        """Return the time at `rates`, FLOPs and bytes per second."""
        return max(self.flops / rates[0], self.bytes / rates[1])


def predicted(
    shape: Shape, lengths: Sequence[int], scored: int, packs: int, *, learns: bool, rates: tuple[float, float] = H100
) -> dict[str, float]:
    """Return family -> seconds of a scoring pass, or of an update if `learns`, over sequences of `lengths`."""
    families = _scored(shape, lengths, scored)
    if learns:
        families = _updated(shape, lengths, scored, packs, families)
    return {name: one.seconds(rates) for name, one in families.items()}


def _scored(shape: Shape, lengths: Sequence[int], scored: int) -> dict[str, Counted]:
    tokens, keys = sum(lengths), sum(keys_seen(0, length) for length in lengths)
    each = HALF * tokens * shape.layers  # bytes of one number per token and layer
    heads = (shape.heads + shape.kv_heads) * shape.head_dim
    return {
        "products": Counted(flops=2 * matrices(shape) * tokens),
        "products of the head": Counted(
            flops=2 * shape.hidden * shape.vocab * scored, bytes=SINGLE * shape.vocab * scored
        ),
        "loss and softmax of the head": Counted(bytes=SINGLE * shape.vocab * scored),
        "attention": Counted(flops=4 * shape.layers * shape.heads * shape.head_dim * keys),
        "rotary and layout": Counted(bytes=each * 2 * heads),
        "norm": Counted(bytes=each * 4 * shape.hidden),
        "SwiGLU": Counted(bytes=each * 3 * shape.intermediate),
        "residual": Counted(bytes=each * 6 * shape.hidden),
    }


def _updated(
    shape: Shape, lengths: Sequence[int], scored: int, packs: int, forward: Mapping[str, Counted]
) -> dict[str, Counted]:
    tokens, parameters = sum(lengths), matrices(shape) + embeddings(shape)
    each = HALF * tokens * shape.layers
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    backward = {
        "products": Counted(flops=2 * forward["products"].flops),
        # the logits are computed a second time, and two gradients
        "products of the head": Counted(flops=3 * forward["products of the head"].flops),
        "loss and softmax of the head": Counted(bytes=(SINGLE + HALF) * shape.vocab * scored),
        "attention": Counted(flops=2.5 * forward["attention"].flops),
        # flash attention writes the keys' and values' gradients for every query head
        "attention layout": Counted(bytes=each * 2 * (queries + keys)),
        "rotary and layout": Counted(bytes=each * (3 * (queries + keys) + 2 * keys)),
        # the gradients of input and weight each read input and gradient; the residual's gradient is added
        "norm": Counted(bytes=each * 2 * (5 + 3) * shape.hidden),
        "SwiGLU": Counted(bytes=each * 5 * shape.intermediate),
        "gradient accumulation": Counted(bytes=packs * EMBEDDING_GRADIENT * shape.hidden * shape.vocab),
        "optimizer": Counted(bytes=(ADAMW + SINGLE + HALF) * parameters),
        "gradient norm": Counted(bytes=SINGLE * parameters),
        "gradient clipping": Counted(bytes=2 * SINGLE * parameters),
        "gradients finite": Counted(bytes=SINGLE * parameters),
        "zeroed gradients": Counted(bytes=SINGLE * parameters),
    }
    none = Counted()
    return {
        name: Counted(
            forward.get(name, none).flops + backward.get(name, none).flops,
            forward.get(name, none).bytes + backward.get(name, none).bytes,
        )
        for name in {**forward, **backward}
    }


def matrices(shape: Shape) -> int:
    """Return the parameters of all layers' matrices."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


def embeddings(shape: Shape) -> int:
    """Return the parameters of the embedding and the output head."""
    return (1 if shape.tied else 2) * shape.hidden * shape.vocab
