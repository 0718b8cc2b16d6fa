"""Switches between the statements of hicache: its functions run as if they had been written with a point before each.

A thread of CPython can lose its turn nearly anywhere, not only where it waits or takes a lock. The points find what is
shared without one. They are part of recompiled code, put into the functions for the time of a life: a trace function
would stay with the thread, not with the fiber.
"""

from __future__ import annotations

import ast
import builtins
import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

POINT = "__simulated_point__"
LEFT_ALONE = ("hicache.tracing", "hicache.wire", "hicache.cli", "hicache.plan", "hicache.connectors", "hicache.kernels")


class _Points(ast.NodeTransformer):
    """Puts a point before every statement of every function, and between the read and the write of ``x += f()``."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = self._with_points(node.body, is_function=True)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.body = self._with_points(node.body, is_function=True)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if isinstance(node.target, ast.Attribute | ast.Subscript):
            node.value = ast.copy_location(_call([node.value]), node.value)
        return node

    def _with_points(self, body: list[ast.stmt], *, is_function: bool = False) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for number, statement in enumerate(body):
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, None)
                if isinstance(inner, list) and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    setattr(statement, name, self._with_points(inner))
            for handler in getattr(statement, "handlers", ()):
                handler.body = self._with_points(handler.body)
            for case in getattr(statement, "cases", ()):
                case.body = self._with_points(case.body)
            is_docstring = is_function and number == 0 and isinstance(statement, ast.Expr)
            if not is_docstring and not isinstance(statement, ast.Global | ast.Nonlocal):
                result.append(ast.copy_location(ast.Expr(_call([])), statement))
            result.append(self.visit(statement))
        return result


def _call(arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(POINT, ast.Load()), arguments, [])


@cache
def _instrumented() -> list[tuple[types.FunctionType, types.CodeType]]:
    """Functions of hicache, and their code with points."""
    codes: dict[tuple[str, str, int], types.CodeType] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.startswith("hicache") and path and not name.startswith(LEFT_ALONE):
            with open(path) as file:
                tree = ast.fix_missing_locations(_Points().visit(ast.parse(file.read(), path)))
            for code in _codes_of(compile(tree, path, "exec", dont_inherit=True)):
                codes[path, code.co_qualname, code.co_firstlineno] = code
    found = []
    for function in gc.get_objects():
        if type(function) is types.FunctionType:
            before = function.__code__
            code = codes.get((before.co_filename, before.co_qualname, before.co_firstlineno))
            if code is not None and code.co_freevars == before.co_freevars:
                found.append((function, code))
    return found


def _codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_of(constant)


def prepare() -> None:
    """Find the functions while the collector shows all."""
    _instrumented()


@contextmanager
def points(point: Callable[..., Any]) -> Iterator[None]:
    """In this block hicache calls ``point`` between its statements; with one argument it returns that."""
    setattr(builtins, POINT, point)
    functions = [(function, function.__code__, code) for function, code in _instrumented()]
    for function, _, code in functions:
        function.__code__ = code
    try:
        yield
    finally:
        for function, before, _ in functions:
            function.__code__ = before


__all__ = ["points", "prepare"]
