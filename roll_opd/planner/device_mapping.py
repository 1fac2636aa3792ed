"""The devices (or CPU slots) of a role, read from its `device_mapping`.

ROLL users write Python in a string, such as "list(range(0, 8)) + [12, 13]". The string is parsed, and its syntax tree
is interpreted node by node. It is never evaluated as Python code.
"""

import ast
from collections.abc import Sequence

MAX_DEVICES = 1_000_000  # so that a typing error such as range(0, 10**9) gives an error and does not fill the memory
ACCEPTED = 'write it as "list(range(0,8))", "range(0,8)", "[0,1,2]" or a YAML list, joined with + if needed'


def parse_device_mapping(value: str | int | Sequence[int]) -> tuple[int, ...]:
    """Return the device numbers that `value` lists, in the same order.

    Raises ValueError if the list is empty, if it contains a device twice, or if it contains anything but non-negative
    whole numbers. The message is a sentence for the user.
    """
    devices = _parse_text(value) if isinstance(value, str) else _literal_list(value)
    if not devices:
        raise ValueError(f"{value!r} lists no device; {ACCEPTED}")
    seen: set[int] = set()
    for device in devices:
        if device < 0:
            raise ValueError(f"device {device} is negative; use numbers from 0, counted over all nodes")
        if device in seen:
            raise ValueError(f"device {device} is listed twice; remove one of the two")
        seen.add(device)
    return tuple(devices)


def short_devices(devices: Sequence[int]) -> str:
    """Write [0, 1, 2, 3, 6] as "0-3,6"."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _literal_list(value: int | Sequence[int]) -> list[int]:
    items = [value] if type(value) is int else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"{value!r} is not a list of devices; {ACCEPTED}")
    for item in items:
        if type(item) is not int:
            raise ValueError(f"{item!r} is not a whole number; {ACCEPTED}")
    return list(items)


def _parse_text(text: str) -> list[int]:
    try:
        value = _interpret(ast.parse(text.strip(), mode="eval").body, text)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} cannot be read; {ACCEPTED}") from None
    return [value] if isinstance(value, int) else value


def _interpret(node: ast.expr, text: str) -> int | list[int]:
    """Return the value of a node of the syntax tree. Only lists, range() and sums are accepted."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, text)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_number(item, text) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list(left, text) + _list(right, text)
        case ast.Call(func=ast.Name(id="list"), args=[items], keywords=[]):
            return _list(items, text)
        case ast.Call(func=ast.Name(id="range"), args=[_, *_] as arguments, keywords=[]) if len(arguments) <= 3:
            return _range([_number(argument, text) for argument in arguments])
    raise ValueError(f"{ast.unparse(node)!r} is not allowed in {text!r}; {ACCEPTED}")


def _range(arguments: list[int]) -> list[int]:
    if len(arguments) == 3 and arguments[2] == 0:
        raise ValueError("range() needs a step other than 0")
    numbers = range(*arguments)
    if len(numbers) > MAX_DEVICES:
        raise ValueError(f"{numbers} lists more than {MAX_DEVICES} devices")
    return list(numbers)


def _number(node: ast.expr, text: str) -> int:
    value = _interpret(node, text)
    if not isinstance(value, int):
        raise ValueError(f"{ast.unparse(node)!r} in {text!r} is not a whole number; {ACCEPTED}")
    return value


def _list(node: ast.expr, text: str) -> list[int]:
    value = _interpret(node, text)
    if isinstance(value, int):
        raise ValueError(f"{ast.unparse(node)!r} in {text!r} is not a list; {ACCEPTED}")
    return value
