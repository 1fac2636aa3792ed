"""Split assertion code into calls for the sandbox and expected values, which the program never sees.

For example, `assert f(1) == [2]` becomes `_seen(0, f(1))`, which runs in the sandbox. The literal `[2]` stays outside
and is compared there. This works for comparisons with a literal anywhere in the code: in a `test_` or `check` function,
in a loop, or joined by `and`.

Other assertions are evaluated in the sandbox, in the process of the program. The sandbox reports only whether such an
assertion holds, so each of them must be executed.

`check_of_call` splits test cases of APPS, TACO and LiveCodeBench in the same way. These test cases call a function, or
a method of the class `Solution`.
"""

import ast
import builtins
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_opd.extras.graders.sandbox.comparison import TOLERANCE, Unreadable, read_value, same_value

Compare = Callable[[Any, Any, float], Any]  # (value, literal, tolerance) -> whether the check holds


def _exactly(compare: Callable[[Any, Any], Any]) -> Compare:
    return lambda left, right, _: compare(left, right)


def _is_one_of(left: Any, right: Any, tolerance: float) -> bool:
    if isinstance(right, list | tuple):
        return any(same_value(left, one, tolerance) for one in right)
    return left in right


_COMPARE: dict[type[ast.cmpop], Compare] = {
    ast.Eq: same_value,
    ast.NotEq: _exactly(operator.ne),
    # only for None, True and False
    ast.Is: _exactly(lambda left, right: type(left) is type(right) and left == right),
    ast.IsNot: _exactly(lambda left, right: type(left) is not type(right) or left != right),
    ast.In: _is_one_of,
    ast.NotIn: _exactly(lambda left, right: left not in right),
    ast.Lt: _exactly(operator.lt),
    ast.LtE: _exactly(operator.le),
    ast.Gt: _exactly(operator.gt),
    ast.GtE: _exactly(operator.ge),
}
_MIRROR: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}


@dataclass(frozen=True)
class Expectation:
    """A comparison that is made outside the sandbox."""

    compare: Compare
    literal: Any
    always: bool  # reached in every correct run: outside of conditions and loops
    never: bool = False  # reached in no correct run: `assert False` after a call that must raise

    def holds(self, written: Any, tolerance: float) -> bool:
        try:
            return bool(self.compare(read_value(written), self.literal, tolerance))
        except (Unreadable, TypeError, ValueError, ArithmeticError, RecursionError):
            return False


@dataclass(frozen=True)
class HiddenCheck:
    """Code that runs after the program, and the values that the code should produce."""

    code: str
    expected: tuple[Expectation, ...]
    called: frozenset[str] = frozenset()  # names of functions and classes in the test

    def passes(self, seen: Any, tolerance: float = TOLERANCE) -> bool:
        """Return whether recorded values meet the expectations.

        Args:
            seen: a list of pairs (number of an expectation, value). It comes from the program and is not trusted.
        """
        reached = set()
        for pair in seen if isinstance(seen, list) else ():
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int:
                return False
            number, written = pair
            if not 0 <= number < len(self.expected) or not self.expected[number].holds(written, tolerance):
                return False
            reached.add(number)
        if not reached and any(not item.never for item in self.expected):
            return False  # no test ran, such as in a class without calls
        return all(number in reached for number, item in enumerate(self.expected) if item.always)


def hide_expected(code: str) -> HiddenCheck:
    """Split assertion code into code for the sandbox and expected values.

    Raises SyntaxError if the code is not Python.
    """
    hider = _Hider()
    tree = ast.fix_missing_locations(hider.visit(ast.parse(code)))
    return HiddenCheck(ast.unparse(tree), tuple(hider.expected), frozenset(_names_of_the_program(tree)))


def _names_of_the_program(tree: ast.AST) -> set[str]:
    """Return the names that the code reads but does not define."""
    nodes = list(ast.walk(tree))
    made = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - made - vars(builtins).keys() - {"_seen"}


def _has_members(node: ast.expr) -> bool:
    """Return whether an iterable has at least one member for certain.

    The members are known for a literal and for a range of literals. They are also known if one of these is an argument
    of enumerate, zip, reversed or sorted.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in ("enumerate", "zip", "reversed", "sorted"):
            return bool(node.args) and all(map(_has_members, node.args))
        if node.func.id != "range":
            return False
        try:
            return len(range(*map(ast.literal_eval, node.args))) > 0
        except (ValueError, TypeError, OverflowError):
            return False
    try:
        return len(ast.literal_eval(node)) > 0
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


class _Hider(ast.NodeTransformer):
    def __init__(self) -> None:
        self.expected: list[Expectation] = []
        self._branches = 0

    def visit_Assert(self, node: ast.Assert) -> list[ast.AST]:
        parts = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else None
        return [self._one(part) for part in parts or [node.test]]

    def _one(self, test: ast.expr) -> ast.AST:
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return self._outcome(test)
        for asked, literal, op in (
            (test.left, test.comparators[0], type(test.ops[0])),
            (test.comparators[0], test.left, _MIRROR.get(type(test.ops[0]))),
        ):
            try:
                value = ast.literal_eval(literal)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
            if op is None or (op in (ast.Is, ast.IsNot) and not (value is None or isinstance(value, bool))):
                continue
            return self._seen(_COMPARE[op], value, asked)
        return self._outcome(test)

    def _outcome(self, test: ast.expr) -> ast.AST:
        outcome = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), test))
        never = isinstance(test, ast.Constant) and not test.value
        return self._seen(_exactly(operator.is_), True, outcome, never)

    def _seen(self, compare: Compare, literal: Any, asked: ast.expr, never: bool = False) -> ast.AST:
        self.expected.append(Expectation(compare, literal, not self._branches, never))
        arguments = [ast.Constant(len(self.expected) - 1), asked]
        return ast.Expr(ast.Call(func=ast.Name("_seen", ast.Load()), args=arguments, keywords=[]))

    def _branch(self, node: ast.AST) -> ast.AST:
        self._branches += 1
        self.generic_visit(node)
        self._branches -= 1
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        # a program could redefine `range` to make a loop empty
        leaves = any(isinstance(inner, ast.Break | ast.Continue | ast.Return) for inner in ast.walk(node))
        return self._branch(node) if leaves or not _has_members(node.iter) else self.generic_visit(node)

    visit_If = visit_While = visit_Try = visit_With = visit_ClassDef = visit_AsyncFunctionDef = _branch

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # tests and checks are called once each, helpers perhaps never
        is_called = node.name.startswith("test_") or node.name == "check"
        return self.generic_visit(node) if is_called else self._branch(node)


def check_of_call(
    name: str, arguments: Sequence[Any], named: Mapping[str, Any], answer: Any, wrapped: bool
) -> HiddenCheck:
    """Return the check of one call; raise ValueError if a value cannot be written as code.

    Args:
        name: name of the function or of the method.
        arguments: positional arguments.
        named: arguments by name.
        answer: the expected value.
        wrapped: whether `answer` may be a one-item list that contains the expected value.
    """
    wanted = plain(answer)
    accepted = [wanted, wanted[0]] if wrapped else [wanted]
    shown = [repr(plain(argument)) for argument in arguments]
    written = ", ".join([*shown, *(["**" + repr(plain(named))] if named else [])])
    code = f"_seen(0, getattr(Solution() if 'Solution' in globals() else __import__('solution'), {name!r})({written}))"

    def is_accepted(value: Any, _: None, tolerance: float) -> bool:
        return any(same_value(plain(value), one, tolerance) for one in accepted)

    return HiddenCheck(code, (Expectation(is_accepted, None, always=True),), frozenset({name}))


def is_wrapped(answers: Sequence[Any]) -> bool:
    """Return whether every answer of a row is a one-item list, as in APPS.

    If the expected values themselves were lists, their lengths would usually differ.
    """
    return all(isinstance(answer, tuple | list) and len(answer) == 1 for answer in answers)


def plain(value: Any) -> Any:
    """Convert a value to JSON types; raise ValueError if that is not possible.

    Tuples become lists, and keys become strings.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if value - value != 0:
            raise ValueError(f"{value} cannot be written as code")
        return value
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): plain(item) for key, item in value.items()}
    raise ValueError(f"{type(value).__name__} is not a plain value")
