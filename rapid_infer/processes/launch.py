"""Starts and ends child processes that run a module, from the parent's side; `take_over` is the child's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_EXIT_WAIT = 0.5


def start_module(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """`python -m module arguments`, in this process's environment changed by `env`; `options` are Popen's. OSError.

    The child finds the modules that this process finds, also those of a plugin in a script's own folder, and none that
    happen to lie in its working directory.
    """
    paths = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **(env or {})}
    return subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], env=environment, **options)


class ChildProcess:
    """A child that runs `module`, whose last argument is its end of a socket; `sock` is this side's.

    `name` is what messages call it. Interrupts are held back from it until it calls `take_over`. It may not be forked
    along.
    """

    def __init__(self, name: str, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.owner = os.getpid()
        self.sock, theirs = socket.socketpair()
        try:
            with theirs:
                # Held back until the child ignores it: an interrupt must not end it halfway through its imports.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    fd = theirs.fileno()
                    self.process = start_module(
                        module, *arguments, str(fd), env=env, stdin=subprocess.DEVNULL, pass_fds=[fd]
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            self.sock.close()
            raise
        self.name = f"{name} (pid {self.process.pid})"

    @property
    def is_ours(self) -> bool:
        """False in a process that was forked after this one started the child."""
        return os.getpid() == self.owner

    def how_it_ended(self) -> str:
        """In words, for a process whose end of the socket is closed; one that is still there is killed."""
        try:
            code = self.process.wait(_EXIT_WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"{self.name} closed its connection and was killed"
        if code >= 0:
            return f"{self.name} ended with exit code {code}"
        try:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"{self.name} was killed by signal {-code}"

    def stop(self, grace: float) -> None:
        """Wait `grace` seconds for its end, then kill it; frees the socket."""
        if self.is_ours:
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with contextlib.suppress(OSError):
            self.sock.close()


def take_over(fd: int) -> socket.socket:
    """The child's end of the socket; to be called before anything else. Interrupts are ignored from now on."""
    # A terminal sends an interrupt to all its processes; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sock = socket.socket(fileno=fd)
    # Whatever this process starts must not hold the socket open when it is gone.
    sock.set_inheritable(False)
    return sock
