"""Put a bug into a running interpreter: the functions of a module get the code of its wrong source.

Nothing is imported again, so that a forked process with collected tests meets the bug at once.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from types import CodeType, FunctionType

__all__ = ("functions_by_file", "swap")

_CONSTANT = (str, bytes, int, float, bool, tuple, list, dict, set, frozenset)
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

    Of what runs while a module is imported, constants can be changed later; defaults, decorators and class attributes
    cannot.

    Args:
        functions: those that were imported from the file.
        file: of the module.
        source: of the module.
        changed: its changed tree, with the same lines.
    """
    right = compile(source, file, "exec", dont_inherit=True)
    codes = dict(_differences(right, compile(changed, file, "exec", dont_inherit=True)))
    pairs = [(found, codes[found.__code__]) for found in functions if found.__code__ in codes]
    if right in codes and _are_constants(ast.parse(source), changed):
        return not pairs and _swap_constants(file, source, changed)
    if not pairs or not all(_is_function(code) for code in codes):
        return False
    if any(function.__code__.co_freevars != code.co_freevars for function, code in pairs):
        return False
    for function, code in pairs:
        function.__code__ = code
    return True


def _are_constants(right: ast.Module, wrong: ast.Module) -> bool:
    """Return whether trees differ only in constants of the module."""
    pairs = list(zip_longest(right.body, wrong.body))
    differing = [one for one, other in pairs if one is None or other is None or ast.dump(one) != ast.dump(other)]
    return all(isinstance(one, ast.Assign | ast.AnnAssign) for one in differing)


def _swap_constants(file: str, source: str, changed: ast.Module) -> bool:
    """Replace the constants of a module that differ, also where other modules have imported them."""
    owner = next(module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == file)
    right, wrong = (
        _constants(owner.__name__, file, compile(one, file, "exec", dont_inherit=True)) for one in (source, changed)
    )
    names = [name for name, value in wrong.items() if name in right and repr(value) != repr(right[name])]
    for name in names:
        held = vars(owner)[name]
        importers = [] if name.startswith("_") else list(sys.modules.values())
        for module in (owner, *importers):
            if vars(module).get(name) is held:
                setattr(module, name, wrong[name])
    return bool(names)


def _constants(name: str, file: str, code: CodeType) -> dict[str, object]:
    """Run a module once more; return the values of its constants."""
    values: dict[str, object] = {"__name__": name, "__file__": file}
    exec(code, values)  # noqa: S102 - a module of the package
    return {name: value for name, value in values.items() if type(value) in _CONSTANT and not name.startswith("__")}


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
