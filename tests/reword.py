"""Spells the ends of all messages of a tree's product backwards, so that tests fail which pin their wording. By hand,
in a clone of the repository, whose files it changes:

    .venv/bin/python tests/reword.py && launch/test

The end of a message is what follows its first clause of three words or more, and a remedy that has a name of its own.
Values, options, and names in code and files stay as they are. Of the tests that fail then, those of snapshots and pages
may compare whole sentences; all others should hold the error's type, the exit code and values.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

CALLS = {"warning", "info", "error", "warn", "print", "fault", "say"}  # besides errors: functions that take messages
PARTS = {"remedy", "said", "told", "why", "how", "what", "line"}  # names of variables that hold parts of messages
END = re.compile(r"[:;,(] ?| because | so that | as ")  # where a clause may end
# Words in small letters, unless they are part of an option, a name in code or a file.
WORD = re.compile(r"(?<![-\w./_`'\"<={\[])[a-z]{3,}(?![-\w/_`'\"=}\]]|\.\w|\()")


class Reworded(ast.NodeTransformer):
    """A change of a module's syntax tree, by which its messages have other ends."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in CALLS or name.endswith("Error"):
            node.args = [self.with_other_end(argument) for argument in node.args]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id in PARTS:
            node.value = self.with_other_end(node.value, node.targets[0].id == "remedy")
        return node

    def with_other_end(self, node: ast.expr, ended: bool = False) -> ast.expr:
        """Return a message, plain or an f-string, whose end is reworded; anything else as it is.

        ended: True if it is all end
        """
        parts, words = node.values if isinstance(node, ast.JoinedStr) else [node], 0
        for part in parts:
            words += 1
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                text, words = part.value, words - 1
                ends = (end.end() for end in END.finditer(text) if words + len(text[: end.end()].split()) > 2)
                end = 0 if ended else next(ends, len(text))
                words, ended = words + len(text.split()), ended or end < len(text)
                part.value = text[:end] + WORD.sub(lambda found: found[0][::-1], text[end:])
        return node


if __name__ == "__main__":
    for path in (path for root in ("cocodiff", "eval") for path in Path(root).rglob("*.py")):
        path.write_text(ast.unparse(Reworded().visit(ast.parse(path.read_text()))) + "\n")
