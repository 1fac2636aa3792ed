"""Hints that a model directory has lost layers. They are not proof: the model may be smaller on purpose."""

import re
from collections.abc import Iterator
from pathlib import Path

WINDOW_LAYERS = "max_window_layers"  # at most the number of layers in Qwen releases
ITS_DEFAULT = 28  # default of transformers, independent of the number of layers
IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)  # Qwen3-8B; not 8x7B, not A3B
LESS = 0.95  # minimum ratio of parameters to the size in the name; releases have at least 0.98


def lost_layer_hints(path: Path, layers: int, parameters: int, window_layers: object) -> Iterator[str]:
    """Yield a message per hint; `window_layers` is the config's `max_window_layers`, or None."""
    if isinstance(window_layers, int) and window_layers > layers and window_layers != ITS_DEFAULT:
        yield f"config.json has {WINDOW_LAYERS} {window_layers} and num_hidden_layers {layers}"
    if named := IN_NAME.findall(path.resolve().name):
        billions = float(named[-1])
        if parameters < LESS * billions * 1e9:
            yield f"its name says {billions:g} billion parameters, and its weights have {parameters / 1e9:.3g} billion"
