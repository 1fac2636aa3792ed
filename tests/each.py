"""Cases of a property in one test: collecting and reporting hundreds of tests takes longer than running them."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test function once per case, as one test. An error names the case in which it was raised.

    Only for functions without fixtures that a case changes.

    Args:
        names: name of the argument that has the case, or names of the arguments that have its items.
    """
    taken = (names,) if isinstance(names, str) else names
    cases = list(cases)

    def over(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            assert cases, "no case"
            for case in cases:
                values = dict(zip(taken, (case,) if isinstance(names, str) else case, strict=True))
                try:
                    test(**values, **fixtures)
                except BaseException as error:
                    error.add_note(f"in the case {values}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in taken]
        all_cases.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        del all_cases.__wrapped__  # pytest would read the signature of the function behind it
        return all_cases

    return over
