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


def public_modules() -> Iterator[ModuleType]:
    """Import every module whose name has no underscore."""
    for name in modules():
        if not any(part.startswith("_") for part in name.split(".")):
            yield import_module(name)


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


def test_all_names_exist_once() -> None:
    wrong, count = [], 0
    for module in public_modules():
        names = exported(module)
        count += len(names)
        wrong += [f"{module.__name__}.{name}" for name in names if not hasattr(module, name) or names.count(name) > 1]
    assert wrong == []
    assert count > 500


def test_modules_and_exported_names_have_docstrings() -> None:
    bare = []
    for module in public_modules():
        bare += [module.__name__] if not module.__doc__ else []
        for export in exported(module):
            value = getattr(module, export)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not value.__doc__:
                bare.append(f"{module.__name__}.{export}")
    assert bare == []


def test_public_methods_have_docstrings() -> None:
    classes = [value for export in nsqext.__all__ if inspect.isclass(value := getattr(nsqext, export))]
    bare = [
        f"{value.__name__}.{name}"
        for value in classes
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


_WITHOUT_BROKER = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cramjam", "re2", "h11", "starlette", "trio", "uvicorn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for name in ("nsqext", "nsqext.sync", "nsqext.admin", "nsqext.app", "nsqext.cli", "nsqext.delays", "nsqext.errors",
             "nsqext.middleware", "nsqext.observability", "nsqext.partitions", "nsqext.testing",
             "nsqext.testing.plugin", "nsqext.transactions"):
    module = importlib.import_module(name)
    if name != "nsqext.testing":  # its names are the simulation
        for exported in getattr(module, "__all__", ()):
            getattr(module, exported)
print(sorted(name for name in sys.modules if name.startswith(("nsqext.broker", "nsqext.testing.simulation"))))
"""


def test_without_the_extra_broker_neither_the_cluster_nor_the_simulation_is_loaded() -> None:
    """The simulation replaces private parts of asyncio, anyio and uvicorn: only tests that ask for it load it."""
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_BROKER], capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr
