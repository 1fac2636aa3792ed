"""FLOPs of a model's forward and backward passes, computed from the sizes of the model.

A product of an [m, k] and a [k, n] matrix has 2mkn FLOPs. The count includes the products of each token with the
matrices of the model, and its attention to the keys that it sees. In a mixture of experts, only the experts that a
token uses are counted.

These are not counted: the embedding's look-up, norms, activations, softmax, the optimizer, and recomputed layers.

For Gated DeltaNet, the FLOPs of the recurrence are counted. The engine computes these layers in chunks, which takes
more FLOPs.
"""

from collections import Counter
from collections.abc import Callable

from roll_opd.models.families import FAMILIES
from roll_opd.models.model_info import ModelInfo, matrix_parameters

# FLOPs of forward and backward passes, divided by the FLOPs of forward; adapters need no gradients of weights
TRAINED, TRAINED_ADAPTERS = 3, 2


def used_parameters(info: ModelInfo) -> int:
    """Return the number of parameters in the matrices by which each token is multiplied, summed over all layers.

    Embedding, head and norms are not included.
    """
    has_gate = FAMILIES[info.model_type].settings.get("moe_shared_expert_gate")
    return matrix_parameters(info, info.experts_per_token, has_gate=bool(has_gate))


def keys_seen(first: float, end: float, window: int = 0) -> float:
    """Return the total number of keys that a range of tokens sees.

    The tokens are at positions `first` to `end` - 1 of a sequence. A token also sees its own key. With a `window`, a
    token sees at most that many keys.
    """
    if window and end > window:
        full = end - max(first, window)  # tokens that see a full window
        return full * window + (keys_seen(first, window) if first < window else 0)
    return (end * (end + 1) - first * (first + 1)) / 2


def forward_flops(info: ModelInfo, tokens: float, keys: Callable[[int], float], predicted: float) -> float:
    """Return the FLOPs of forward passes.

    Args:
        info: the model.
        tokens: number of tokens that pass through the layers.
        keys: function that takes a window (0: no window). It returns the total number of keys that the tokens see in a
            layer with this window.
        predicted: number of tokens that pass through the output head.
    """
    widths = info.head_dim + (info.latent.value if info.latent else info.head_dim)  # scores, and the sum of values
    windows = Counter(info.windows or (0,) * info.layers)
    windows[0] -= sum(info.is_delta)
    attention = sum(number * 2 * info.heads * widths * keys(window) for window, number in windows.items())
    # a token reads the state twice and updates it once; the decay is not counted
    states = 6 * sum(info.is_delta) * info.delta.values * info.delta.key_width if info.delta else 0
    return (2 * used_parameters(info) + states) * tokens + attention + 2 * info.hidden * info.vocab * predicted


def sequence_flops(info: ModelInfo, length: float, predicted: float) -> float:
    """Return the FLOPs of a forward pass over one sequence.

    Args:
        length: number of tokens of the sequence.
        predicted: number of tokens that the output head predicts.
    """
    return forward_flops(info, length, lambda window: keys_seen(0, length, window), predicted)
