"""Remove API keys, tokens and passwords from a configuration before it is written or uploaded."""

from collections.abc import Iterator, Mapping
from typing import Any

SECRETS = ("api_key", "token", "password", "secret", "authorization")  # endings of secret keys


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without secret keys such as `api_key`.

    Any other entry whose value equals the value of a secret key is also removed.
    """
    return _without(values, frozenset(_secrets(values)))


def is_secret(key: Any) -> bool:
    return str(key).lower().endswith(SECRETS)


def _secrets(value: Any, secret: bool = False) -> Iterator[str]:
    """Yield the values of all secret keys. If `secret` is set, all strings in `value` are secret."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, secret or is_secret(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item, secret)
    elif secret and isinstance(value, str) and value:
        yield value


def _without(value: Any, secrets: frozenset[str]) -> Any:
    def hidden(item: Any) -> bool:
        return isinstance(item, str) and item in secrets

    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if not (is_secret(key) or hidden(item))}
        return {key: _without(item, secrets) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_without(item, secrets) for item in value if not hidden(item)]
    return value
