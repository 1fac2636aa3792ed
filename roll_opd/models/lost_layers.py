"""Hints in a model directory that the model was once larger. They prove nothing: a smaller model may be meant."""

import re
from collections.abc import Iterator
from pathlib import Path

WINDOW_LAYERS = "max_window_layers"  # in the releases of Qwen at most the number of layers
ITS_DEFAULT = 28  # of transformers, whatever the number of layers is
IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)  # Qwen3-8B; not 8x7B, not A3B
LESS = 0.95  # share of the number in a name; releases have 0.98 of it at least, and mostly more


def lost_layer_hints(path: Path, layers: int, parameters: int, window_layers: object) -> Iterator[str]:
    """Yield a sentence for each hint; `window_layers` is the config's `max_window_layers`, or None."""
    if isinstance(window_layers, int) and window_layers > layers and window_layers != ITS_DEFAULT:
        yield f"config.json has {WINDOW_LAYERS} {window_layers} and num_hidden_layers {layers}"
    if named := IN_NAME.findall(path.resolve().name):
        billions = float(named[-1])
        if parameters < LESS * billions * 1e9:
            yield f"its name says {billions:g} billion parameters, and its weights have {parameters / 1e9:.3g} billion"
