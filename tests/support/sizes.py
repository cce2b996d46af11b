"""Report the sizes of the package: files, functions and classes over the numbers below. Never fails."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[2] / "src"
FILE_LINES, FUNCTION_LINES, CLASS_FIELDS = 400, 50, 12
NUM_SHOWN = 10
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
_NOT_CODE |= {tokenize.ENDMARKER}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Size(NamedTuple):
    number: int
    name: str


def functions(tree: ast.Module, path: str) -> Iterator[Size]:
    """The lines of each function, decorators and docstring included."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield Size((node.end_lineno or first) - first + 1, f"{path}:{node.lineno} {node.name}")


def classes(tree: ast.Module, path: str) -> Iterator[Size]:
    """The fields of each class: annotated in its body, or assigned to `self` in its methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield Size(len(_fields(node)), f"{path}:{node.lineno} {node.name}")


def _fields(node: ast.ClassDef) -> set[str]:
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for method in (each for each in node.body if isinstance(each, _FUNCTIONS) and each.args.args):
        own = method.args.args[0].arg
        for each in ast.walk(method):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == own:
                fields.add(each.attr)
    return fields


def code_lines(text: str) -> int:
    """Lines with a token that is neither a comment nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def report(source: Path = SOURCE) -> str:
    """Totals, and the largest of each kind that is over its number."""
    files: list[Size] = []
    of_functions: list[Size] = []
    of_classes: list[Size] = []
    num_code = 0
    for path in sorted(source.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(source).as_posix()
        tree = ast.parse(text)
        files.append(Size(len(text.splitlines()), name))
        of_functions += functions(tree, name)
        of_classes += classes(tree, name)
        num_code += code_lines(text)
    lines = [f"{source.name}: {len(files)} files, {sum(file.number for file in files)} lines, {num_code} of code"]
    for what, unit, bound, sizes in (
        ("files", "lines", FILE_LINES, files),
        ("functions", "lines", FUNCTION_LINES, of_functions),
        ("classes", "fields", CLASS_FIELDS, of_classes),
    ):
        over = sorted((size for size in sizes if size.number > bound), reverse=True)
        lines.append(f"{what} of more than {bound} {unit}: {len(over)} of {len(sizes)}")
        lines += [f"  {size.number:5} {size.name}" for size in over[:NUM_SHOWN]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
