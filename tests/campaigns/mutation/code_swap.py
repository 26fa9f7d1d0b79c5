"""Put a bug into a running interpreter: the functions of a module get the code of its wrong source.

Nothing is imported again, so that a forked process with collected tests meets the bug at once.
"""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from types import CodeType, FunctionType

__all__ = ("functions_by_file", "swap")

_NEW_LOCALS = 0x2
"""Flag of code with local variables of a call, in contrast to that of a module or class."""


def functions_by_file() -> dict[str, list[FunctionType]]:
    """Return file -> the functions that were imported from it, also those that are hidden behind decorators."""
    files: defaultdict[str, list[FunctionType]] = defaultdict(list)
    gc.unfreeze()
    for found in gc.get_objects():
        if type(found) is FunctionType:  # isinstance would ask a weak proxy for the class of what is gone
            files[found.__code__.co_filename].append(found)
    gc.freeze()
    return files


def swap(functions: list[FunctionType], file: str, source: str, changed: ast.Module) -> bool:
    """Give the functions of a module the code of a changed one; return whether this puts the change in.

    What runs while a module is imported (defaults, decorators, class attributes) cannot be changed later.

    Args:
        functions: those that were imported from the file.
        file: of the module.
        source: of the module.
        changed: its changed tree, with the same lines.
    """
    right = compile(source, file, "exec", dont_inherit=True)
    codes = dict(_differences(right, compile(changed, file, "exec", dont_inherit=True)))
    pairs = [(found, codes[found.__code__]) for found in functions if found.__code__ in codes]
    if not pairs or not all(_is_function(code) for code in codes):
        return False
    if any(function.__code__.co_freevars != code.co_freevars for function, code in pairs):
        return False
    for function, code in pairs:
        function.__code__ = code
    return True


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & _NEW_LOCALS)


def _differences(right: CodeType, wrong: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield each function that differs with its wrong code; module and class only for what they run themselves."""
    if _is_function(right) or _own(right) != _own(wrong):
        yield right, wrong
    for one, other in zip_longest(_inner(right), _inner(wrong)):
        if one is None or other is None:
            yield right, wrong
        elif one != other:
            yield from _differences(one, other)


def _own(code: CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_names, tuple(repr(c) for c in code.co_consts if not isinstance(c, CodeType))


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]
