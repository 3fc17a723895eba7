"""Check of the loopback interface, over which the processes of one machine connect."""

from __future__ import annotations

import socket

WAIT = 5.0  # seconds; a loopback interface that is up answers in microseconds


def check_loopback() -> None:
    """Check that this machine can connect to itself; otherwise torch's process groups would wait for minutes.

    Raises:
        OSError: connecting to 127.0.0.1 fails.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=WAIT).close()
    except OSError as error:
        raise OSError(
            f"this machine cannot connect to itself at 127.0.0.1 ({error.strerror or error}), as vLLM has to: bring "
            "the loopback interface up (ip link set lo up), or run the container with a network"
        ) from error
