"""The loopback interface, over which the processes of one machine meet."""

from __future__ import annotations

import socket

WAIT = 5.0  # seconds; a loopback interface that is up answers in microseconds


def check_loopback() -> None:
    """Check that this machine can connect to itself; torch's process groups wait for minutes where it cannot.

    Raises:
        OSError: it cannot.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=WAIT).close()
    except OSError as error:
        raise OSError(
            f"this machine cannot connect to itself at 127.0.0.1 ({error.strerror or error}), as vLLM has to: bring "
            "the loopback interface up (ip link set lo up), or run the container with a network"
        ) from error
