"""`nsqext app schema`: the document of an app."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from nsqext.cli.apps import described
from nsqext.errors import InvalidSetting
from tests.support.asyncapi import checked
from tests.support.command_line import run

SERVICE = """
import nsqext

app = nsqext.App("lookup.example:4161")

@app.handler("orders", "billing")
async def handle(body: dict[str, int]) -> None:
    pass
"""


def test_the_document_of_an_app_is_printed_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    result = run("app", "schema", "service:app", "--title", "Shop", "--version", "2.1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = checked(orjson.loads(result.stdout))
    assert found["info"] == {"title": "Shop", "version": "2.1"}
    assert found["operations"]["handle"]["bindings"]["x-nsq"] == {"channel": "billing"}
    file = tmp_path / "service.json"
    file.write_bytes(result.stdout if isinstance(result.stdout, bytes) else result.stdout.encode())
    assert described(str(file)) == found
    unnamed = orjson.loads(run("app", "schema", "service:app", cwd=tmp_path).stdout)
    assert unnamed["info"] == {"title": "service", "version": "1.0.0"}


@pytest.mark.parametrize("text", ["{", "[]", '{"asyncapi": "2.6.0"}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(InvalidSetting, match=r"other\.json is not"):
        described(str(tmp_path / "other.json"))
