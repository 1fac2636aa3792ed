"""Set the dtype in a config.json."""

from typing import Any

_DTYPE_KEYS = ("torch_dtype", "dtype")


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a copy of a config.json with every existing dtype key, also of inner models, set to `dtype`.

    transformers 5 writes `dtype` and also reads `torch_dtype`; if both exist, the effective one differs by reader.
    """
    keys = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    inner = {
        key: with_dtype(value, dtype)
        for key, value in config.items()
        if key.endswith("_config") and isinstance(value, dict) and any(name in value for name in _DTYPE_KEYS)
    }
    return {**config, **inner, **dict.fromkeys(keys, dtype)}
