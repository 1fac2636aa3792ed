"""The dtype keys of a config.json."""

from typing import Any

_DTYPE_KEYS = ("torch_dtype", "dtype")


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json in which each key of a dtype that it has, those of inner models too, is `dtype`.

    transformers 5 writes `dtype` and reads `torch_dtype` as well; where both are there, which one counts differs.
    """
    keys = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    inner = {
        key: with_dtype(value, dtype)
        for key, value in config.items()
        if key.endswith("_config") and isinstance(value, dict) and any(name in value for name in _DTYPE_KEYS)
    }
    return {**config, **inner, **dict.fromkeys(keys, dtype)}
