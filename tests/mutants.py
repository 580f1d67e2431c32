"""Faults that a tired colleague makes, as small changes of a file's syntax tree.

Every place of a Python file where one of the kinds below fits is a possible fault. `drawn` takes some of them by a
seed, spread over rooms and kinds, and `mutate.py` puts them into copies of the product.
"""

from __future__ import annotations

import ast
import copy
import random
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BORDERS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
AXES = {"dim", "axis", "dim0", "dim1"}
BY_AXIS = {"transpose", "unsqueeze", "flatten", "split", "chunk", "narrow", "select", "swapaxes", "movedim", "unbind"}
COPIES = {"copy", "clone", "contiguous", "deepcopy", "detach"}
LOGS = {"debug", "info", "print", "warning"}
LARGEST = 16  # of whole numbers: one more or less of a larger one is seldom a fault

Place = tuple[str, ast.AST, ast.AST, str]  # a kind, the first and last node of what is replaced, and the new text


class Fault(NamedTuple):
    """One change of a file.

    file: path from the root of the repository
    function: qualified name of the function or class around it, or ""
    kind: of mistake
    start, end: bytes of the file that `new` replaces
    lines: numbers of the first and last line of the statement that is changed
    """

    file: str
    function: str
    kind: str
    start: int
    end: int
    new: str
    lines: tuple[int, int]

    def applied(self, source: bytes) -> bytes:
        """Return the file's content with the fault in it."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def faults_of(root: Path, file: str) -> list[Fault]:
    """List all faults that fit a file."""
    source = (root / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for function, statement, (kind, first, last, new) in _places(ast.parse(source)):
        start = starts[first.lineno - 1] + first.col_offset
        end = starts[last.end_lineno - 1] + last.end_col_offset
        lines = statement.lineno, last.end_lineno or statement.lineno
        found.append(Fault(file, function, kind, start, end, new, lines))
    return found


def drawn(root: Path, faults: Iterable[Fault], count: int, seed: int) -> list[Fault]:
    """Choose some faults at random: rooms in turn, in each room a kind and then a place; none twice in a function."""
    chance = random.Random(seed)
    rooms: dict[str, dict[str, list[Fault]]] = defaultdict(lambda: defaultdict(list))
    for fault in faults:
        rooms[str(Path(fault.file).parent)][fault.kind].append(fault)
    chosen: list[Fault] = []
    taken: set[tuple[str, str]] = set()
    while rooms and len(chosen) < count:
        for room in chance.sample(sorted(rooms), len(rooms)):
            kinds = rooms[room]
            kind = chance.choice(sorted(kinds))
            fault = kinds[kind].pop(chance.randrange(len(kinds[kind])))
            if not kinds[kind]:
                del kinds[kind]
            if not kinds:
                del rooms[room]
            new = (fault.file, fault.function) not in taken
            if new and len(chosen) < count and _fits(fault, (root / fault.file).read_bytes()):
                taken.add((fault.file, fault.function))
                chosen.append(fault)
    return chosen


def _fits(fault: Fault, source: bytes) -> bool:
    """Return True if the file with the fault compiles, to something else than without."""
    changed = fault.applied(source)
    with warnings.catch_warnings(action="ignore"):
        try:
            return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)) and bool(compile(changed, "", "exec"))
        except (SyntaxError, ValueError):
            return False


def _places(tree: ast.Module) -> Iterator[tuple[str, Any, Place]]:
    """Yield each place with the name of the function and the statement around it."""

    def walk(node: ast.AST, names: tuple[str, ...], statement: Any) -> Iterator[tuple[str, Any, Place]]:
        if isinstance(node, ast.stmt):
            statement = node
        for place in _faults_at(node, names):
            yield ".".join(names), statement, place
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
        for child in _children(node):
            yield from walk(child, names, statement)

    for statement in tree.body:
        yield from walk(statement, (), statement)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node in which faults are looked for: neither annotations, decorators, texts nor messages."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                yield one


def _changed(node: Any, **fields: Any) -> str:
    """Return the text of a node with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return ast.unparse(other)


def _faults_at(node: ast.AST, names: Sequence[str]) -> Iterator[Place]:
    """Yield the faults that replace a node, or some of its statements."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in BORDERS:
            yield "border", node, node, _changed(node, ops=[BORDERS[type(op)]()])
        case ast.Compare(ops=[ast.Eq() | ast.NotEq()], left=left, comparators=[right]):
            if isinstance(right, ast.Constant) and isinstance(right.value, int):
                yield "border", node, node, _changed(node, ops=[ast.LtE()], left=left)
        case ast.BoolOp(values=[*values]):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "logic", node, node, _changed(node, op=other)
            yield "condition", node, node, _changed(node, values=values[:-1]) if values[2:] else ast.unparse(values[0])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "logic", node, node, ast.unparse(operand)
        case ast.BinOp(op=op) if type(op) in OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield "arithmetic", node, node, _changed(node, op=OPERATORS[type(op)]())
        case ast.Constant(value=bool()):
            yield "default", node, node, str(not node.value)
        case ast.Constant(value=int()) if node.value <= LARGEST:
            yield "off by one", node, node, str(node.value + 1)
        case ast.Subscript(slice=ast.Constant(value=0)):
            yield "other end", node, node, _changed(node, slice=ast.Constant(-1))
        case ast.Call():
            yield from _faults_of_call(node)
        case ast.Expr(value=ast.Call(func=called)) if _name(called) not in LOGS:
            yield "lost call", node, node, "pass"
        case ast.Assign(targets=[ast.Attribute() as target]) if names[-1:] != ("__init__",):
            yield "forgotten", node, node, "pass"
            kept = f"if not hasattr({ast.unparse(target.value)}, {target.attr!r}): {ast.unparse(node)}"
            yield "first kept", node, node, kept
        case ast.Assign(targets=[ast.Subscript(value=owner, slice=key)], value=value):
            yield "forgotten", node, node, "pass"
            if not isinstance(key, ast.Slice | ast.Tuple):
                yield "first kept", node, node, f"{_changed(owner)}.setdefault({_changed(key)}, {_changed(value)})"
        case ast.Try(finalbody=[first, *_]):
            yield "lost clean-up", first, node.finalbody[-1], "pass"
        case ast.Raise() if names[-1:] != ("__getattr__",):
            yield "swallowed", node, node, "pass"
        case ast.Break() | ast.Continue():
            yield "loop", node, node, "continue" if isinstance(node, ast.Break) else "break"


def _faults_of_call(node: ast.Call) -> Iterator[Place]:
    name, arguments = _name(node.func), node.args
    starred = any(isinstance(one, ast.Starred) for one in arguments)
    if name in OTHER_NAMES and isinstance(node.func, ast.Name):
        yield "min for max", node, node, _changed(node, func=ast.Name(OTHER_NAMES[name]))
    if len(arguments) >= 2 and not starred and name not in ("isinstance", "getattr", "hasattr", "setattr", "zip"):
        yield "swapped", node, node, _changed(node, args=[arguments[1], arguments[0], *arguments[2:]])
    if name in COPIES and isinstance(node.func, ast.Attribute) and not arguments:
        yield "no copy", node, node, ast.unparse(node.func.value)
    if name in COPIES | {"list", "sorted", "dict", "set"} and len(arguments) == 1 and not node.keywords:
        yield "no copy", node, node, ast.unparse(arguments[0])
    for keyword in node.keywords:
        if keyword.arg in AXES and isinstance(keyword.value, ast.Constant | ast.UnaryOp):
            axis = ast.keyword(keyword.arg, ast.BinOp(keyword.value, ast.Sub(), ast.Constant(1)))
            others = [axis if one is keyword else one for one in node.keywords]
            yield "axis", node, node, _changed(node, keywords=others)
        if keyword.arg is not None:
            rest = [one for one in node.keywords if one is not keyword]
            yield "lost option", node, node, _changed(node, keywords=rest)
    if name in BY_AXIS and arguments and isinstance(arguments[-1], ast.Constant | ast.UnaryOp):
        axis = ast.BinOp(arguments[-1], ast.Sub(), ast.Constant(1))
        yield "axis", node, node, _changed(node, args=[*arguments[:-1], axis])


def _name(called: ast.expr) -> str:
    """Return the last name of what is called."""
    return getattr(called, "attr", getattr(called, "id", ""))
