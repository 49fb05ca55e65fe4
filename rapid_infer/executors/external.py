"""Ranks that a launcher has started, as `torchrun --nproc-per-node N -m rapid_infer ...` does: the first one owns the
engine, and starts its own rank; the others come to it over a local socket and serve it as ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import struct
import time
from dataclasses import dataclass

from rapid_infer.errors import ConfigError

_WAIT = 120.0


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process."""

    rank: int
    ranks: int
    host: str
    port: int
    key: str

    @classmethod
    def of_environment(cls) -> Launch | None:
        """None where no launcher has started this process; RANK alone, left over from another job, says nothing."""
        run = os.environ.get("TORCHELASTIC_RUN_ID")
        if run is None:
            return None
        env = os.environ
        key = f"rapid_infer/{run}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), env["MASTER_ADDR"], int(env["MASTER_PORT"]), key)


def _store(launch: Launch) -> object:
    import torch.distributed as dist

    return dist.TCPStore(launch.host, launch.port, is_master=False)


class ExternalRank:
    """A process that this one has not started, at the other end of a socket; as far as it is needed a ChildProcess."""

    is_ours = True

    def __init__(self, rank: int, sock: socket.socket, pid: int) -> None:
        self.sock, self.pid = sock, pid
        self.name = f"rank {rank} (pid {pid})"
        self.process = self

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        return f"{self.name} closed its connection"

    def stop(self, grace: float) -> None:
        """Wait `grace` seconds for its end, then kill it; frees the socket."""
        until = time.monotonic() + grace
        with contextlib.suppress(OSError):
            while time.monotonic() < until and os.path.exists(f"/proc/{self.pid}"):
                time.sleep(0.02)
            if os.path.exists(f"/proc/{self.pid}"):
                self.kill()
        with contextlib.suppress(OSError):
            self.sock.close()


def gather(launch: Launch, ranks: int) -> list[ExternalRank]:
    """Ranks 1 and up, in order. ConfigError when the launcher started another number of them, or one does not come."""
    if launch.ranks != ranks:
        raise ConfigError(
            f"torchrun started {launch.ranks} processes and tensor_parallel_size={ranks}; make them equal: "
            f"--nproc-per-node {ranks}, or -tp {launch.ranks}"
        )
    name = f"rapid-infer-{secrets.token_hex(16)}"
    found: dict[int, ExternalRank] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        # In the abstract namespace: no file is left behind.
        listener.bind(f"\0{name}")
        listener.listen(ranks)
        listener.settimeout(_WAIT)
        _store(launch).set(launch.key, name)  # type: ignore[attr-defined]
        while len(found) < ranks - 1:
            try:
                sock, _ = listener.accept()
            except TimeoutError as error:
                missing = [rank for rank in range(1, ranks) if rank not in found]
                raise ConfigError(f"ranks {missing} of torchrun did not come within {_WAIT:.0f} s") from error
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.getuid():
                sock.close()
                continue
            rank = int.from_bytes(sock.recv(4), "little")
            found[rank] = ExternalRank(rank, sock, pid)
    return [found[rank] for rank in range(1, ranks)]


def follow(launch: Launch) -> int:
    """Serve the first rank's process as rank `launch.rank`; returns the exit code."""
    from rapid_infer.executors.rank_process import serve

    name = _store(launch).get(launch.key).decode()  # type: ignore[attr-defined]
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"\0{name}")
    sock.sendall(launch.rank.to_bytes(4, "little"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return serve(sock)
