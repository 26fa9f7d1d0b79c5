"""Build the distributions, check them, and try the wheel in a new environment of each Python: ``make release-check``.

``python -m tests.release_check`` looks for the Pythons that the project supports on the PATH and among the versions of
pyenv. It prints the versions that it ran, and fails if one of them fails or none is found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.programs import ROOT

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = "broker,cli"

_SMOKE = """
import subprocess
import sys

import anyio
import nsqext
from nsqext.broker import Cluster

assert "site-packages" in nsqext.__file__, nsqext.__file__


async def main(cluster: Cluster) -> None:
    async with nsqext.Producer(lookupd=cluster.lookupd) as producer:
        receipt = await producer.publish("orders", b"hi", headers={"user": "42"}, trace_id=7)
        assert receipt.trace_id == 7
    async with nsqext.Consumer("orders", "billing", lookupd=cluster.lookupd) as consumer:
        message = await anext(consumer)
        assert (message.body, dict(message.headers)) == (b"hi", {"user": "42"})
        await message.finish()


with Cluster(nodes=1) as cluster:
    cluster.create_topic("orders", extend=True, channels=["billing"])
    anyio.run(main, cluster)
    anyio.run(main, cluster, backend="trio")
for words in (["--help"], ["pub", "--help"], ["nsqd", "--version"]):
    subprocess.run([sys.executable, "-m", "nsqext", *words], check=True, stdout=subprocess.DEVNULL)
print(nsqext.__version__)
"""


def pythons() -> dict[str, str]:
    """Return the found interpreters by version."""
    found: dict[str, str] = {}
    for version in VERSIONS:
        for candidate in _candidates(version):
            if _runs(candidate, version):
                found[version] = candidate
                break
    return found


def _candidates(version: str) -> Iterator[str]:
    if on_path := shutil.which(f"python{version}"):
        yield on_path
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from sorted(str(folder / "bin" / "python") for folder in root.glob(f"{version}.*"))


def _runs(python: str, version: str) -> bool:
    """Return whether an interpreter starts and has this version; a shim of pyenv may have none behind it."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def build(folder: Path) -> Path:
    """Build wheel and source distribution, check both, and return the wheel."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True)
    files = sorted(map(str, folder.iterdir()))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    return next(folder.glob("*.whl"))


def try_wheel(python: str, wheel: Path, folder: Path) -> str:
    """Install the wheel into a new environment, run the smoke test there, and return the version that it prints."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    inside = str(folder / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"{wheel}[{EXTRAS}]"], check=True, cwd=folder)
    program = folder / "smoke.py"
    program.write_text(_SMOKE, encoding="utf-8")
    # no PYTHONPATH, so that the installed wheel runs
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [inside, "-W", "error::DeprecationWarning:nsqext", str(program)],
        check=True,
        cwd=folder,
        env=clean,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    return done.stdout.strip()


def main() -> int:
    """Run all checks and print the tested versions."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--dist", type=Path, help="folder for the distributions; a temporary one by default")
    given = arguments.parse_args()
    found = pythons()
    if not found:
        sys.stderr.write(f"none of Python {', '.join(VERSIONS)} was found\n")
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(given.dist or folder / "dist")
        for version, python in found.items():
            printed = try_wheel(python, wheel, folder / f"venv-{version}")
            sys.stdout.write(f"Python {version}: nsqext {printed} published, consumed, and printed its help\n")
    missing = [version for version in VERSIONS if version not in found]
    sys.stdout.write(f"not found, therefore not run: {', '.join(missing) or 'none'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
