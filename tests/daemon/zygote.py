"""Daemons in no time: a process that has imported everything forks one for each test.

Most of a start is importing torch. The fork is a process like any other, with its own threads, files and signals; only
its imports came before. What is passed to `subprocess` beyond an environment makes a real start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAUSE = 0.002
"""Seconds between two looks at whether a process has ended."""


class Zygote:
    """The process that forks; it ends with whoever made it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket, self._lock = ours, threading.Lock()
        self._process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, **request: Any) -> Any:
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            with self._socket.makefile("rb") as lines:
                return json.loads(lines.readline())

    def start(self, argv: list[str], environment: Mapping[str, str], log: Path) -> Forked:
        pid = self.ask(start=argv, environment=dict(environment), log=str(log))
        return Forked(self, argv, pid)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


class Forked:
    """A daemon, with as much of `subprocess.Popen` as tests use."""

    def __init__(self, zygote: Zygote, argv: list[str], pid: int) -> None:
        self.args = argv
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._zygote.ask(wait=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(PAUSE)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(connection: socket.socket) -> None:
    import fusewire.daemon.service  # noqa: PLC0415 - what takes long, and only here
    from fusewire.daemon import cli  # noqa: PLC0415

    assert fusewire.daemon.service
    children: set[int] = set()
    with connection.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            if "wait" in request:
                pid, status = os.waitpid(request["wait"], os.WNOHANG)
                children.discard(pid)
                reply = os.waitstatus_to_exitcode(status) if pid else None
            else:
                pid = os.fork()
                if pid == 0:
                    _become(request, cli.main)
                children.add(pid)
                reply = pid
            connection.sendall(json.dumps(reply).encode() + b"\n")
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _become(request: dict[str, Any], main: Any) -> None:
    code = 1
    try:
        os.closerange(3, 100)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["fusewire", *request["start"]]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - shown as an interpreter that ends would
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
