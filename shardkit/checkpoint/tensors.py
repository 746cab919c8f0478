"""Tensors in files: the safetensors format, written piece by piece with a checksum, and read by byte ranges.

The format (huggingface/safetensors, README "Format"): 8 bytes little-endian N, N bytes of JSON that maps a name to
dtype, shape and data_offsets, then the data without holes.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from shardkit.checkpoint.storage import Storage
from shardkit.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 4 * 2**20
# Bytes that are moved at once.
LARGEST_HEADER = 100_000_000
# The format's own limit.
MOST_DIMS = 64
# torch's own limit.


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype.

    Raises:
        CheckpointError: it has none.
    """
    if dtype not in NAMES:
        raise CheckpointError(f"tensors of {dtype} cannot be stored; expected one of {', '.join(map(str, NAMES))}")
    return NAMES[dtype]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where a tensor lies in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    # Of its first byte, from the beginning of the file.
    length: int
    # Bytes.


def header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """The first bytes of a file with `tensors` of (name, dtype, shape) in this order, and where each one will begin."""
    fields: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, end = [], 0
    for name, dtype, shape in tensors:
        starts.append(end)
        end += _bytes(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[-1], end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [first + start for start in starts]


def read_header(storage: Storage, path: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata.

    Raises:
        CheckpointError: it is no such file, or claims what cannot be.
    """
    size = storage.size(path)
    if size < 8:
        raise CheckpointError(f"{storage.root}/{path} is no safetensors file: it has {size} bytes")
    length = int.from_bytes(_read(storage, path, 0, 8), "little")
    if length > min(size - 8, LARGEST_HEADER):
        raise CheckpointError(f"{storage.root}/{path} is no safetensors file, or was cut off")
    try:
        fields = json.loads(_read(storage, path, 8, length))
        metadata = fields.pop("__metadata__", {})
        tensors = {name: _stored(field, 8 + length) for name, field in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{storage.root}/{path}: its header cannot be read: {error}") from error
    for name, stored in tensors.items():
        if stored.offset < 8 + length or stored.offset + stored.length > size:
            raise CheckpointError(f"{storage.root}/{path}: {name} lies outside the file; it was cut off")
    return tensors, metadata


def write(file: BinaryIO, memory: memoryview, checksum: int = 0) -> int:
    """Write all of `memory`; the running crc32."""
    for begin in range(0, len(memory), PIECE):
        part = memory[begin : begin + PIECE]
        checksum = zlib.crc32(part, checksum)
        while part:
            # An unbuffered file may take less than it is given.
            part = part[file.write(part) :]
    return checksum


def write_tensor(file: BinaryIO, tensor: torch.Tensor, checksum: int) -> int:
    """Write a 1-D tensor from wherever it is; the running crc32."""
    for memory in host_pieces(tensor):
        checksum = write(file, memory, checksum)
    return checksum


def write_whole(storage: Storage, path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write whole tensors to a safetensors file that any reader opens."""
    rows = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    with storage.create(path) as file:
        checksum = write(file, memoryview(header(rows, {"format": "pt"})[0]))
        for tensor in tensors.values():
            checksum = write_tensor(file, tensor.detach().reshape(-1), checksum)


def host_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a 1-D tensor; what is not in host memory comes a piece at a time."""
    if tensor.device.type == "cpu":
        yield memory_of(tensor.detach())
        return
    step = max(1, PIECE // tensor.element_size())
    for begin in range(0, tensor.numel(), step):
        yield memory_of(tensor.detach()[begin : begin + step].cpu())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The live memory of a contiguous 1-D tensor on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def shape_of(value: Any) -> tuple[int, ...]:
    """A shape from a file, if torch can make a tensor of it.

    Raises:
        ValueError: it is none: not of whole numbers, of too many, or of more elements than can be counted.
    """
    if not isinstance(value, list) or len(value) > MOST_DIMS:
        raise ValueError(f"a shape of {len(value) if isinstance(value, list) else type(value).__name__} sizes")
    if any(type(length) is not int or not 0 <= length < 2**56 for length in value):
        raise ValueError("a shape with a size that is no size")
    # 0 times anything is 0, but torch multiplies the others all the same.
    if math.prod(max(1, length) for length in value) >= 2**56:
        raise ValueError("a shape of more elements than there can be")
    return tuple(value)


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return DTYPES[dtype].itemsize * math.prod(shape)


def _stored(field: Any, first: int) -> Stored:
    begin, end = field["data_offsets"]
    shape = shape_of(field["shape"])
    dtype = str(field["dtype"])
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype}")
    if type(begin) is not int or type(end) is not int or begin < 0 or end - begin != _bytes(dtype, shape):
        raise ValueError(f"offsets {begin} to {end} do not hold {dtype} {shape}")
    return Stored(dtype=dtype, shape=shape, offset=first + begin, length=end - begin)


def _read(storage: Storage, path: str, offset: int, length: int) -> bytes:
    memory = bytearray(length)
    storage.read_into(path, offset, memoryview(memory))
    return bytes(memory)
