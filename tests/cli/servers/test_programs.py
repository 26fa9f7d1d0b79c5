"""`nsqext nsqd` and `nsqext nsqlookupd`, run like by a test harness."""

from __future__ import annotations

import platform
import re
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
import trustme
from attrs import frozen

import nsqext
from nsqext.broker import Cluster
from nsqext.cli.servers.broker import banner_of
from tests.support import command_line, plain_http
from tests.support.blocking_client import BlockingClient, eventually, lookup
from tests.support.server_program import LOCAL, running


@frozen
class Ended:
    """Exit status and output of a program."""

    returncode: int
    stdout: str
    stderr: str


def run(*words: str) -> Ended:
    done = command_line.run(*words)
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("name", ["nsqd", "nsqlookupd"])
def test_version_and_unknown_flags(name: str) -> None:
    expected = run(name, "--version")
    build = f"(built w/python{platform.python_version()})"
    assert (expected.returncode, expected.stdout, expected.stderr) == (0, f"{name} v1.3.0 {build}\n", "")
    assert run(name, "--generation", "redesigned", "--version").stdout == f"{name} v0.3.7-HA.1.13.0 {build}\n"
    refused = run(name, "-nope")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"flag provided but not defined: -nope\nUsage of {name}:\n")


def test_the_version_of_the_package() -> None:
    expected = run("--version")
    assert (expected.returncode, expected.stdout) == (0, f"nsqext {nsqext.__version__}\n")


def test_nsqd_serves_and_ends_at_once(tmp_path: Path) -> None:
    with running("nsqd", *LOCAL, "-data-path", str(tmp_path), "--verbose") as program:
        with BlockingClient(program.address("TCP")) as talker:
            assert talker.ask("PUB topic", b"hi") == b"OK"
            assert talker.ask("SUB topic ch") == b"OK"
            talker.send("RDY 1")
            assert talker.message()[2] == b"hi"
        assert plain_http.get(f"http://{program.address('HTTP')}/ping").text == "OK"
        assert program.end() == 0
        assert all(line.startswith("[nsqd] ") for line in program.lines)
        assert len(program.lines) < 15


@pytest.mark.parametrize("name", ["nsqd", "nsqlookupd"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_servers_run_ends_with_status_0(name: str, number: int) -> None:
    """This includes places where an exception of a signal handler would be lost."""
    program = f"""
import os, signal, sys, time
import nsqext.cli

class Lost:
    def __del__(self):
        os.kill(os.getpid(), {int(number)})
        time.sleep(0)

def load(module):
    Lost()
    time.sleep(30)

nsqext.cli.import_module = load
nsqext.cli.main([{name!r}])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=command_line.environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_little_is_imported_before_signals_are_handled() -> None:
    """Before that, a signal kills the process."""
    program = """
import sys
known = set(sys.modules)
import nsqext.cli
print(*sorted(name for name in set(sys.modules) - known))
"""
    command = [sys.executable, "-S", "-c", program]
    found = subprocess.run(command, env=command_line.environment(), capture_output=True, text=True, check=True)
    assert {name for name in found.stdout.split() if name.startswith("nsqext")} == {
        "nsqext",
        "nsqext._version",
        "nsqext.cli",
    }
    assert not {"typing", "collections.abc", "re", "asyncio", "anyio", "typer"} & set(found.stdout.split())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_change_the_exit_status(number: int) -> None:
    """It is received while the servers close, a third one behind that."""
    program = f"""
import os
import anyio
from nsqext.cli.servers.program import run_program

async def serve():
    try:
        os.kill(os.getpid(), {int(number)})
        await anyio.sleep_forever()
    finally:
        os.kill(os.getpid(), {int(number)})

run_program("nsqd", {{"log-level": "error"}}, serve)
os.kill(os.getpid(), {int(number)})
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=command_line.environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_log_lines_are_those_of_the_original_programs() -> None:
    program = """
import logging, os, signal
from nsqext.cli.servers.program import run_program

async def serve():
    log = logging.getLogger("nsqext.broker")
    log.debug("hidden")
    log.warning("seen")
    try:
        raise ValueError("odd")
    except ValueError:
        log.exception("failed")
    os.kill(os.getpid(), signal.SIGTERM)

flags = {"log-prefix": "[mine] ", "generation": "redesigned", "metric-address": ":1", "log-level": 2}
run_program("nsqd", flags, serve)
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=command_line.environment(), capture_output=True, text=True, timeout=60)
    moment = r"\[mine\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6}"
    texts = ("INFO: nsqd v0.*", "WARN: -metric-address has no effect in this server", "WARN: seen", "ERROR: failed")
    expected = "\n".join(f"{moment} {text}" for text in texts) + "\nTraceback(.|\n)*ValueError: odd\n"
    assert re.fullmatch(expected, ended.stderr), ended.stderr
    assert ended.returncode == 0


def test_nsqd_logs_clients_topics_and_lookup_and_shows_one_build(tmp_path: Path) -> None:
    with running("nsqlookupd", *LOCAL) as lookupd:
        words = ("-data-path", str(tmp_path), "-lookupd-tcp-address", lookupd.address("TCP"), "-broadcast-address=h")
        with running("nsqd", *LOCAL, *words) as program:
            with BlockingClient(program.address("TCP")) as talker:
                peer = talker.peer
                assert talker.ask("SUB topic ch") == b"OK"
            http, directory = program.address("HTTP"), lookupd.address("HTTP")
            eventually(lambda: lookup(directory, "/lookup", topic="topic").get("channels"))
            (found,) = lookup(directory, "/lookup", topic="topic")["producers"]
            assert f"127.0.0.1:{found['tcp_port']}" == program.address("TCP")
            first = plain_http.get(f"http://{http}/stats").text.splitlines()[0]
            assert first == run("nsqd", "--version").stdout.strip()
            assert program.end() == 0
            eventually(lambda: lookup(directory, "/nodes")["producers"], lambda nodes: nodes == [])
            log = "\n".join(program.lines)
        assert first in log
        for text in (
            *(f"TCP: new client({peer})", f"CLIENT({peer}): desired protocol magic '  V2'", "TOPIC(topic): created"),
            *("TOPIC(topic): new channel(ch)", f"PROTOCOL(V2): [{peer}] exiting ioloop"),
            *(
                f"LOOKUP({lookupd.address('TCP')}): adding peer",
                f"LOOKUPD({lookupd.address('TCP')}): REGISTER topic ch",
            ),
        ):
            assert f" INFO: {text}" in log
        assert lookupd.end() == 0
        log = "\n".join(lookupd.lines)
        assert " REGISTER category:channel key:topic subkey:ch" in log
        assert " IDENTIFY Address:h TCP:" in log


@pytest.mark.parametrize("name", ["nsqd", "nsqlookupd"])
def test_the_programs_listen_on_ipv6_and_ipv4_by_default(name: str, tmp_path: Path) -> None:
    with running(name, "-tcp-address", "0.0.0.0:0", "-http-address", ":0", cwd=tmp_path) as program:
        port = program.address("HTTP").rpartition(":")[2]
        assert program.address("HTTP") == f"[::]:{port}"
        for host in ("127.0.0.1", "[::1]"):
            assert plain_http.get(f"http://{host}:{port}/ping").text == "OK"


def test_web_pages_are_refused_with_the_guard(tmp_path: Path) -> None:
    evil = {"Origin": "http://evil.example"}
    with running("nsqd", *LOCAL, "-data-path", str(tmp_path)) as program:
        url = f"http://{program.address('HTTP')}/topic/create?topic=t"
        assert plain_http.post(url, headers=evil).status_code == 200
    with running("nsqlookupd", *LOCAL, "--http-guard", "--http-host=nsq.example") as program:
        url = f"http://{program.address('HTTP')}/topic/create?topic=t"
        assert plain_http.post(url, headers=evil).status_code == 403
        assert plain_http.post(url, headers={"Host": "nsq.example"}).status_code == 200


def test_the_secret_of_auth_is_in_no_log(tmp_path: Path) -> None:
    class Auth(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = b'{"ttl":60,"authorizations":[{"topic":".*","channels":[".*"],"permissions":["publish"]}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    asked: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Auth) as auth:
        Thread(target=auth.serve_forever, daemon=True).start()
        address = f"-auth-http-address=127.0.0.1:{auth.server_port}"
        with running("nsqd", *LOCAL, "-data-path", str(tmp_path), address, "--log-level=debug") as program:
            with BlockingClient(program.address("TCP")) as talker:
                talker.send("AUTH", b"hunter2")
                assert b"permission_count" in talker.frame()[1]
                assert talker.ask("PUB t", b"x") == b"OK"
            assert program.end() == 0
        auth.shutdown()
    assert asked == ["/auth?common_name=&remote_ip=127.0.0.1&secret=hunter2&tls=false"]
    assert "hunter2" not in "\n".join(program.lines)


def test_nsqd_uses_the_working_directory(tmp_path: Path) -> None:
    with running("nsqd", *LOCAL, cwd=tmp_path) as program:
        program.address("TCP")
        with running("nsqd", *LOCAL, cwd=tmp_path) as second:
            _, errors = second.process.communicate()
            assert second.process.wait() == 1
            assert b"FATAL: failed to instantiate nsqd - failed to lock data-path" in errors
        assert program.end(signal.SIGINT) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nsqd_finds_its_data_again(tmp_path: Path, number: int) -> None:
    with running("nsqd", *LOCAL, "-data-path", str(tmp_path)) as program:
        with BlockingClient(program.address("TCP")) as talker:
            assert talker.ask("PUB topic", b"kept") == b"OK"
        program.end(number)
    with (
        running("nsqd", *LOCAL, "-data-path", str(tmp_path)) as program,
        BlockingClient(program.address("TCP")) as talker,
    ):
        assert talker.ask("SUB topic ch") == b"OK"
        talker.send("RDY 1")
        assert talker.message()[2] == b"kept"


def test_an_address_in_use_ends_the_program(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for words in (("nsqd", "-data-path", str(tmp_path)), ("nsqlookupd",)):
            ended = run(*words, "-tcp-address", address, "-http-address", "127.0.0.1:0")
            expected = (
                f"FATAL: failed to instantiate {words[0]} - listen ({address}) failed - listen tcp {address}: bind: "
            )
            assert (ended.returncode, f"{expected}address already in use\n" in ended.stderr) == (1, True)
            assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:x", "nothing"])
def test_an_invalid_address_ends_the_program(address: str) -> None:
    ended = run("nsqlookupd", "-tcp-address", address, "-http-address", "127.0.0.1:0")
    assert (ended.returncode, f"listen ({address}) failed - listen tcp: address " in ended.stderr) == (1, True)
    assert "Traceback" not in ended.stderr


def test_missing_certificates_are_named(tmp_path: Path) -> None:
    for words, text in (("-tls-cert=/none -tls-key=/none", "open /none"), ("-tls-key=/none", "open ")):
        ended = run("nsqd", *LOCAL, "-data-path", str(tmp_path), *words.split())
        assert f"failed to build TLS config - {text}: no such file or directory\n" in ended.stderr
        assert ended.returncode == 1


def test_a_configuration_file_and_what_config_shows(tmp_path: Path) -> None:
    file = tmp_path / "nsqd.cfg"
    file.write_text('http_address = "127.0.0.1:0"\nmax_rdy_count = 9\nsync_timeout = "1s"\nmax_msg_size = 5\n')
    words = ("-tcp-address=127.0.0.1:0", "-config", str(file), "-data-path", str(tmp_path), "-max-msg-size=6")
    with running("nsqd", *words, "-broadcast-address=here") as program:
        http = program.address("HTTP")

        def shown(name: str) -> str:
            return plain_http.get(f"http://{http}/config/{name}").text

        names = ("max_rdy_count", "sync_timeout", "max_msg_size", "http_address", "https_address")
        assert [shown(name) for name in names] == ["9", "1000000000", "6", "127.0.0.1:0", "0.0.0.0:4152"]
        port = http.rpartition(":")[2]
        assert [shown("broadcast_http_port"), shown("statsd_prefix")] == [port, f"nsq.here_{port}."]


def test_a_missing_data_path_ends_the_program(tmp_path: Path) -> None:
    ended = run("nsqd", *LOCAL, "-data-path", str(tmp_path / "none"))
    assert (ended.returncode, "no such file or directory" in ended.stderr) == (1, True)


def test_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    pem = str(tmp_path / "both.pem")
    words = ("-data-path", str(tmp_path), "--https-address", "127.0.0.1:0", "--tls-cert", pem, "--tls-key", pem)
    with running("nsqd", *LOCAL, *words) as program:
        import ssl

        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        assert httpx.get(f"https://{program.address('HTTPS')}/ping", verify=context).text == "OK"
    with running("nsqd", "--generation=redesigned", *LOCAL, *words) as program:  # which ends at TLS 1.2
        url = f"https://{program.address('HTTPS')}/ping"
        with pytest.raises(httpx.ConnectError, match="SSL"):
            httpx.get(url, verify=context)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        assert httpx.get(url, verify=context).text == "OK"


def test_standalone_redesigned_programs_find_each_other(tmp_path: Path) -> None:
    with running(
        "nsqlookupd", "--generation=redesigned", "--alsologtostderr=false", "--log-level=2", *LOCAL
    ) as lookupd:
        expected = f"--lookupd-tcp-address={lookupd.address('TCP')}"
        with (
            running("nsqd", "--generation=redesigned", expected, *LOCAL, "-data-path", str(tmp_path)) as nsqd,
            BlockingClient(nsqd.address("TCP")) as talker,
        ):
            assert talker.ask("INTERNAL_CREATE_TOPIC topic 1 true") == b"OK"
            assert talker.ask("PUB topic 1", b"x") == b"OK"
            eventually(lambda: list(lookup(lookupd.address("HTTP"), "/lookup", topic="topic")["partitions"]) == ["1"])


def test_the_broker_command() -> None:
    with running("broker", "--nodes", "2", "--topic", "orders:partitions=2,extend,channel=billing") as program:
        lines: list[str] = []
        while "ready" not in lines:
            lines.append(program.printed())
        assert lines[0] == f"nsqext {nsqext.__version__} broker: redesigned NSQ, messages in memory"
        address = lines[1].rpartition(" ")[2]
        assert f"export NSQEXT_LOOKUPD={address}" in lines
        assert [line.partition(":")[0] for line in lines[1:5]] == [
            "nsqlookupd l1",
            "nsqd n1",
            "nsqd n2",
            "topic orders",
        ]
        found = lookup(address, "/lookup", topic="orders", access="w", metainfo="true")
        assert (found["meta"]["extend_support"], sorted(found["partitions"]), found["channels"]) == (
            True,
            ["0", "1"],
            ["billing"],
        )
        assert program.end() == 0


def test_the_broker_banner_shows_the_topics_of_the_data_path() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("invoices", channels=["audit"])
        cluster.create_topic("orders", channels=["billing"])
        lines = banner_of(cluster, "in memory", [], "").splitlines()
        wanted = banner_of(cluster, "in memory", ["orders"], "").splitlines()
    assert {"topic invoices: channels audit", "topic orders: channels billing"} <= set(lines)
    assert lines[-4:-2] == ["  nsqext pub invoices hello", "  nsqext tail invoices --start earliest"]
    assert wanted[-4:-2] == ["  nsqext pub orders hello", "  nsqext tail orders --start earliest"]


def test_the_commands_of_the_broker_banner_work_as_they_are() -> None:
    with running("broker", "--nodes", "1") as program:
        banner: list[str] = []
        while "ready" not in banner:
            banner.append(program.printed())
        script = "\n".join(line for line in banner if line.startswith(("export ", "nsqext "))).partition("\n")[2]
        script = script.replace("nsqext ", f"{sys.executable} -m nsqext ").replace("tail ", "tail --count 1 ")
        ended = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, '"hello"' in ended.stdout.splitlines()[-1]) == (0, True), ended
        assert program.end(signal.SIGINT) == 0


def test_the_broker_command_refuses_clearly() -> None:
    ended = run("broker", "--topic", "orders:colour=red")
    assert (ended.returncode, "unknown topic option 'colour=red'" in ended.stderr) == (2, True)
    assert "Traceback" not in ended.stderr
    ended = run("broker", "--nodes", "0")
    assert (ended.returncode, "nodes=0 is not within 1..64" in ended.stderr) == (2, True)
