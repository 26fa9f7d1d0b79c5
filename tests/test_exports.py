"""The exports of the package: complete, sorted, documented, and cheap to import."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

import nsqext

# need an extra that the test environment leaves out
_OPTIONAL = ("nsqext.arrow", "nsqext.spark")
HEAVY = ("starlette", "uvicorn", "typer", "rich", "pyspark", "trio", "pytest", "opentelemetry", "prometheus_client")
LATER = ("asyncio", "httpx", "ssl", "hashlib", "concurrent.futures", "nsqext.sync", "nsqext.admin")
"""What a client loads when it is opened, or when a setting or an error needs it."""


NOT_PUBLISHING = (
    "nsqext.client.consumer.consumer",
    "nsqext.client.consumer.options",
    "nsqext.client.consumer.handlers",
    "nsqext.client.producer.batcher",
    "nsqext.app",
)
"""What a producer that only publishes does not use."""


def modules() -> Iterator[str]:
    """Name every module of the package, except the one that runs when it is imported."""
    yield "nsqext"
    for info in pkgutil.walk_packages(nsqext.__path__, "nsqext."):
        if not info.name.endswith("__main__") and not info.name.startswith(_OPTIONAL):
            yield info.name


MODULES = list(modules())
PUBLIC = [name for name in MODULES if not any(part.startswith("_") for part in name.split("."))]


def exported(module: ModuleType) -> tuple[str, ...]:
    """Return the module's ``__all__``; without one, the functions and classes that other modules may use."""
    made_here = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    names = getattr(module, "__all__", tuple(name for name in made_here if not name.startswith("_")))
    assert isinstance(names, tuple), f"{module.__name__}.__all__ is a {type(names).__name__}, not a tuple"
    return names


def order(name: str) -> tuple[int, str]:
    """Sort key of ruff for ``__all__``: constants, classes, other names."""
    bare = name.strip("_")
    return (0 if bare.isupper() and len(bare) > 1 else 1 if bare[:1].isupper() else 2), name


@pytest.mark.parametrize("name", PUBLIC)
def test_all_names_exist_once(name: str) -> None:
    module = import_module(name)
    names = exported(module)
    assert len(names) == len(set(names))
    assert [missing for missing in names if not hasattr(module, missing)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_modules_and_exported_names_have_docstrings(name: str) -> None:
    module = import_module(name)
    bare = [name] if not module.__doc__ else []
    for export in exported(module):
        value = getattr(module, export)
        if (inspect.isclass(value) or inspect.isroutine(value)) and not value.__doc__:
            bare.append(f"{name}.{export}")
    assert bare == []


@pytest.mark.parametrize("export", sorted(getattr(nsqext, "__all__", ())))
def test_public_methods_have_docstrings(export: str) -> None:
    value = getattr(nsqext, export)
    if not inspect.isclass(value):
        return
    bare = [
        name
        for name, member in vars(value).items()
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property))
        and not inspect.getdoc(getattr(value, name))
    ]
    assert bare == []


def test_the_package_exports_all_its_public_names_in_order() -> None:
    bound = {
        name
        for name, value in vars(nsqext).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert bound <= set(nsqext.__all__)
    assert list(nsqext.__all__) == sorted(nsqext.__all__, key=order)


def test_the_version_is_exported() -> None:
    assert nsqext.__version__.count(".") == 2


@pytest.mark.parametrize(
    ("used", "others"),
    [
        ("nsqext", ("typing", "re", "attrs", "anyio", "orjson", "logging", "nsqext.errors", "nsqext.client")),
        ("nsqext.Producer", NOT_PUBLISHING),
        ("nsqext.Producer(nsqd='127.0.0.1:4150')", NOT_PUBLISHING),
        ("nsqext.Consumer", ("nsqext.client.producer.producer",)),
    ],
)
def test_import_is_light(used: str, others: tuple[str, ...]) -> None:
    """The import loads no package of an extra and no event loop; HTTP and TLS are imported when first used."""
    unwanted = HEAVY + LATER + others
    program = f"import sys, nsqext; {used}; print([name for name in {unwanted!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=20)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("wanted", "package", "extra"),
    [
        ("from nsqext.spark import register", "pyspark", "spark"),
        ("from nsqext.spark import dedupe", "pyspark", "spark"),
        ("import nsqext.arrow", "pyarrow", "arrow"),
        ("import nsqext.observability.otel", "opentelemetry", "otel"),
        ("import nsqext.observability.prometheus", "prometheus_client", "prometheus"),
    ],
)
def test_a_missing_extra_is_named(wanted: str, package: str, extra: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None\n{wanted}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert ended.stderr.rstrip().endswith(f": pip install 'nsqext[{extra}]'")
    assert "ModuleNotFoundError: " in ended.stderr and package in ended.stderr.splitlines()[-1]
