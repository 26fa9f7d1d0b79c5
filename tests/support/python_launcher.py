"""The interpreter that Spark and xdist start in tests: has another process fork one, and stands for it.

Runs without site-packages, and imports as little as it can: each start costs that of an interpreter alone.
"""

import json
import os
import signal
import socket
import sys

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(path: str, words: list[str]) -> int:
    """Run ``python WORDS`` with the streams, folder and environment of this process; returns its exit code."""
    replies, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 (pathlib takes longer to import than everything else)
        "terminal": False,
        "leads": False,
        "whole": False,
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        control.connect(path)
        socket.send_fds(control, [json.dumps(request).encode()], [0, 1, 2, other.fileno()])
    other.close()
    pid = int(replies.recv(32))
    for kind in _SIGNALS:
        signal.signal(kind, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the end of the output is that of the forked process
        os.dup2(nothing, stream)
    code = int(replies.recv(32) or b"1")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:]))
