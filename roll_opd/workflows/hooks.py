"""Check that a run of a user's workflow calls every Trinity-RFT hook that its class overrides.

Calls are found in the bytecode: a method is assumed to call every method whose name it mentions. A hook counts as
called if its name is mentioned in code that the run reaches, or in any other code of the user's modules.

A method may also pass `self` to other code, or compute the name of an attribute. Such a method may call any hook. So if
the run reaches such a method, all hooks count as called, except the hooks that only the runner calls (`RUN`).

If only roll_opd calls a hook, the hook must accept the arguments of this call.
"""

import dis
import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from roll_opd.workflows.workflow_interface import Workflow, flag

PACKAGE = "roll_opd."
# builtins that do not call methods of their argument; builtins that access a named attribute
OBJECT_BUILTINS, ATTRIBUTE_BUILTINS = ("isinstance", "type", "id", "hash"), ("getattr", "hasattr", "setattr")
RUN = ("run", "run_async", "execute", "set_repeat_times")  # methods that only the runner calls
RUNNER = "roll_opd.workers"  # calls the entry methods of a class
TWINS = {"run": "run_async", "step": "step_async", "reward": "reward_async"}
TWINS |= {value: name for name, value in TWINS.items()}
BY_KEYWORD = ("step_num",)  # arguments of hooks that are passed by keyword; all others are positional
# hook of Trinity-RFT's classes -> remedy if nothing calls it
HOOKS = {
    "format_messages": "derive from SimpleWorkflow or OnPolicyDistillWorkflow, whose runs call it",
    "format_prompt": "derive from MathBoxedWorkflow, whose run calls it with workflow_args use_base",
    "compute_reward": "derive from OnPolicyDistillWorkflow, whose run calls it, or call it in your own run",
    "calculate_reward": "call it in your own run, or name it compute_reward in an OnPolicyDistillWorkflow",
    "step": "derive from StepWiseRewardWorkflow or RewardPropagationWorkflow, or write step_async",
    "step_async": "derive from AsyncStepWiseRewardWorkflow or AsyncRewardPropagationWorkflow, or write step",
    "reward": "derive from StepWiseRewardWorkflow or RewardPropagationWorkflow, or write reward_async",
    "reward_async": "derive from AsyncStepWiseRewardWorkflow or AsyncRewardPropagationWorkflow, or write reward",
    "run": "the class is asynchronous (is_async): write run_async, or is_async = False",
    "run_async": "write is_async = True in the class, or name it run",
    "execute": "write run or run_async; their return value is collected",
    "set_repeat_times": "write can_repeat = True if one call makes all runs of a row, else remove the method",
}


def hook_problems(kind: type) -> Iterator[tuple[str, str]]:
    """Yield (class and method, problem) for each hook of a user's class that has a problem.

    Two problems are reported: the run never calls the hook, or calls it in a way that the hook does not support.
    """
    own = [base for base in kind.__mro__ if not base.__module__.startswith((PACKAGE, "builtins"))]
    written = {name: base for base in reversed(own) for name in HOOKS.keys() & vars(base).keys()}
    if not any(isinstance(vars(base)[name], FunctionType | staticmethod) for name, base in written.items()):
        return
    by, is_open = _mentions(kind)
    elsewhere = _mentioned_elsewhere(own)
    for name, instead in HOOKS.items():
        if name not in written or not isinstance(hook := vars(written[name])[name], FunctionType | staticmethod):
            continue
        called = f"{written[name].__name__}.{name}"
        if name not in by and name not in elsewhere:
            # a class may have a synchronous and an asynchronous form
            if TWINS.get(name) not in written and (name in RUN or not is_open):
                yield called, f"is never called; {instead}"
        elif any(module.startswith(PACKAGE) for module in by.get(name, ())) and name != "execute":
            is_called_by_package_only = all(module.startswith(PACKAGE) for module in by[name]) and name not in elsewhere
            problem = _async_problem(name, hook) or (_call_problem(kind, name) if is_called_by_package_only else None)
            if problem:
                yield called, problem


def _async_problem(name: str, hook: Any) -> str | None:
    """Check that a hook is asynchronous if its caller awaits it, and synchronous otherwise; return the problem or None.

    Either the hook is awaited but returns nothing that can be awaited, or it is a coroutine function but is not
    awaited.
    """
    is_awaited, is_coroutine = name.endswith("_async"), inspect.iscoroutinefunction(hook)
    if is_awaited and not _may_be_awaited(hook) and name != "run_async":
        return "is awaited; write `async def`"
    if is_coroutine and not is_awaited and name != "run":
        other = f" or name it {TWINS[name]} in an asynchronous base" if name in TWINS else ""
        return f"is called without `await`; write it without `async`{other}"
    return None


def _call_problem(kind: type, name: str) -> str | None:
    """Check that a hook accepts the arguments of its calls; return the problem or None.

    The expected arguments are read from the base class that declares the hook. If the hook has a decorator, the
    signature after decoration is checked, because a decorator may change the arguments.
    """
    declared = next(
        (vars(base).get(name) for base in kind.__mro__ if _is_package_class(base) and name in vars(base)), None
    )
    try:
        _, *expected = inspect.signature(declared).parameters  # type: ignore[arg-type]
        signature = inspect.signature(getattr(kind, name), follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    is_bound = not isinstance(inspect.getattr_static(kind, name), staticmethod)
    positional = [*(["self"] if is_bound else []), *(one for one in expected if one not in BY_KEYWORD)]
    try:
        signature.bind(*positional, **{one: one for one in expected if one in BY_KEYWORD})
    except TypeError as error:
        passed = ", ".join(f"{one}={one}" if one in BY_KEYWORD else one for one in expected)
        return f"takes {signature} but is called as {name}({passed}) ({error}); declare the parameters of this call"
    return None


def _is_package_class(base: type) -> bool:
    return base.__module__.startswith(PACKAGE)


def _mentions(kind: type) -> tuple[dict[str, set[str]], bool]:
    """Return (mentions, is_open) for the methods that a run may call.

    `mentions` maps the name of each method to the modules that mention it. `is_open` is True if user code may call any
    method.
    """
    both = isinstance(getattr(kind, "is_async", None), property)  # a property has a value only for an instance
    entries = ["run", "run_async"] if both else ["run_async" if flag(kind, "is_async") else "run"]
    entries += ["reset"] if flag(kind, "can_reset") or callable(getattr(kind, "resettable", None)) else []
    entries += ["set_repeat_times"] if flag(kind, "can_repeat") else ["set_single_run_context"]
    found = {name: {RUNNER} for name in ["__init__", "experiences_of", *entries]}
    left, is_open = list(found), False
    while left:
        method = left.pop()
        for base, code in _called(kind, method):
            own = set(names_in(code))
            if base.__module__.startswith(PACKAGE):  # in this package, `one.eid.run` and `one.reward` are not calls
                own = (own - TWINS.keys()) | set(_self_attributes(code))
            else:
                is_open = is_open or _passes_self(code)
            for name in own - {method}:  # a method may call the same method of its base class
                if name not in found:
                    left.append(name)
                found.setdefault(name, set()).add(base.__module__)
    return found, is_open


def _called(kind: type, name: str) -> Iterator[tuple[type, CodeType]]:
    """Yield (class, code) for a method, and for each method of a base class that it may call through super().

    A method is assumed to call super() if its code mentions its own name.
    """
    for base in kind.__mro__:
        codes = list(codes_of(vars(base).get(name)))
        yield from ((base, code) for code in codes)
        if codes and not any(name in names_in(code) for code in codes):
            return


def _mentioned_elsewhere(own: Sequence[type]) -> set[str]:
    """Return the names that the functions and the other classes of the user's modules mention."""
    found: set[str] = set()
    for module in {kind.__module__ for kind in own} & sys.modules.keys():
        for part in list(vars(sys.modules[module]).values()):
            if getattr(part, "__module__", None) == module and part not in own:
                is_class = isinstance(part, type)
                parts = list(vars(part).values()) if is_class and not issubclass(part, Workflow) else [part]
                found |= {name for each in parts for code in codes_of(each) for name in names_in(code)}
    return found


def codes_of(part: Any) -> Iterator[CodeType]:
    """Yield the code of a function, a method or a property.

    The code of decorators is included, and that of functions in closures.
    """
    if isinstance(part, property):
        left: list[Any] = [part.fget, part.fset]
    else:
        left = [getattr(part, "__func__", getattr(part, "func", part))]
    seen: set[int] = set()
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        left += [inner for inner in (getattr(function, "__wrapped__", None),) if callable(inner)]
        if isinstance(function, FunctionType):
            left += [
                value for cell in function.__closure__ or () if isinstance(value := _cell_value(cell), FunctionType)
            ]
            yield function.__code__


def _cell_value(cell: CellType) -> Any:
    """Return the value of a closure's cell, or None if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _may_be_awaited(hook: Any) -> bool:
    """Return whether the return value of a function may be awaited."""
    for code in codes_of(hook):
        if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE):
            return True
        for before, each in itertools.pairwise(dis.get_instructions(code)):
            is_made = before.opname.startswith(("CALL", "LOAD")) and before.opname != "LOAD_CONST"
            if each.opname == "RETURN_VALUE" and is_made:
                return True
    return False


def _passes_self(code: CodeType, own: str = "") -> bool:
    """Return whether a method passes `self` to other code, or reads an attribute whose name it computes."""
    own = own or next(iter(code.co_varnames), "self")
    found = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    padded = [("", ""), ("", ""), *found, ("", ""), ("", "")]
    for place, (operation, value) in enumerate(padded):
        if value != own or operation not in ("LOAD_FAST", "LOAD_DEREF"):
            continue
        (_, earlier), (_, before), _, (after, constant), (later, _) = padded[place - 2 : place + 3]
        is_named = after == "LOAD_CONST" and isinstance(constant, str) and later in ("PRECALL", "CALL", "LOAD_CONST")
        is_super = "super" in (earlier, before) or before == "__class__"
        is_used = after.endswith(("_ATTR", "_METHOD")) or after == "COPY" or is_super  # COPY: self.count += 1
        if not (is_used or before in OBJECT_BUILTINS or (before in ATTRIBUTE_BUILTINS and is_named)):
            return True
    return any(_passes_self(one, own) for one in code.co_consts if isinstance(one, CodeType) and own in one.co_freevars)


def _self_attributes(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes that code reads from `self` or super()."""
    before = ""
    for instruction in dis.get_instructions(code):
        if before in ("self", "super") and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            yield str(instruction.argval)
        if instruction.opname not in ("PRECALL", "CALL"):
            before = "super" if instruction.argval == "super" else str(instruction.argval)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in the code. Strings that may be names are included, as in `getattr(self, "reward")`."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
