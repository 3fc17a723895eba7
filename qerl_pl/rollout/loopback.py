"""Check of the loopback network interface (127.0.0.1), over which processes on one machine connect to each other."""

import socket

WAIT = 5.0  # seconds until the check fails; a working loopback interface answers in microseconds


def check_loopback() -> None:
    """Raise OSError if this machine cannot connect to itself at 127.0.0.1. Without this check, torch's process groups
    would hang for minutes before they fail."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=WAIT).close()
    except OSError as error:
        raise OSError(
            f"this machine cannot connect to itself at 127.0.0.1 ({error.strerror or error}), as vLLM has to: bring "
            "the loopback interface up (ip link set lo up), or run the container with a network"
        ) from error
