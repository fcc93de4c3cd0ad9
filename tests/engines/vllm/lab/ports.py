"""Ports for servers that cannot be told to choose one themselves and say which."""

import itertools
import os
import socket
from pathlib import Path

_FIRST = 15_000  # above what services are commonly found at
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_turns = itertools.count()


def free_port() -> int:
    """A loopback port that nobody listens on, and that the kernel gives to nobody unasked.

    One that the kernel chose is back in its range once the probe is closed, and seconds may go by
    until a server binds it: an engine that starts opens dozens of sockets. So it is one from
    below that range; each call, and each process, begins to look elsewhere.
    """
    num_ports = int(_RANGE.read_text().split()[0]) - _FIRST
    start = os.getpid() * 101
    for _ in range(num_ports):
        port = _FIRST + (start + next(_turns)) % num_ports
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no free port from {_FIRST} to {_FIRST + num_ports}")
