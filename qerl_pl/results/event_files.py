"""Read scalars from TensorBoard event files and count the bytes that cannot be read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] (generated)
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.util.tensor_util import make_ndarray

HEADER = 12  # bytes of a record before its data: the data's length, and a checksum of the length
FOOTER = 4  # bytes of a record after its data: the data's checksum


class Scalar(NamedTuple):
    """One value of a scalar."""

    tag: str
    step: int
    value: float
    time: float
    """Wall-clock time at which the scalar was logged, in seconds since the epoch."""


def read_scalars(path: Path) -> tuple[list[Scalar], int]:
    """Read the scalars of an event file.

    A record whose data has a wrong checksum is skipped. A record whose length has one ends the reading, because the
    start of the next record is unknown.

    Returns:
        The scalars in the order in which they were written, and the number of bytes that could not be read.
    """
    data = path.read_bytes()
    found: list[Scalar] = []
    place = lost = 0
    while place < len(data):
        header = data[place : place + HEADER]
        if len(header) < HEADER or _checksum(header[8:]) != masked_crc32c(header[:8]):
            return found, lost + len(data) - place
        start = place + HEADER
        end = start + struct.unpack("<Q", header[:8])[0]
        if end + FOOTER > len(data):
            return found, lost + len(data) - place
        record, footer, place = data[start:end], data[end : end + FOOTER], end + FOOTER
        if _checksum(footer) == masked_crc32c(record):
            found += _scalars(Event.FromString(record))
        else:
            lost += HEADER + len(record) + FOOTER
    return found, lost


def _checksum(stored: bytes) -> int:
    return struct.unpack("<I", stored)[0]


def _scalars(event: Event) -> list[Scalar]:
    found = []
    for value in event.summary.value:
        if value.HasField("simple_value"):
            found.append(Scalar(value.tag, event.step, value.simple_value, event.wall_time))
        elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name == "scalars":
            found.append(Scalar(value.tag, event.step, float(make_ndarray(value.tensor)), event.wall_time))
    return found
