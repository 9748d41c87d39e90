"""Parquet's Bloom filters: the row groups of a file that cannot hold any of some values. PyArrow
writes them only.

Source: https://github.com/apache/parquet-format/blob/master/BloomFilter.md. A filter is a header
and blocks of eight words; the upper half of a value's XXH64 selects a block, the lower half a bit
of each word.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from pyiceberg.io import InputStream

_SALTS = np.array(
    [
        0x47B6137B,
        0x44974D91,
        0x8824AD5B,
        0xA2B7289D,
        0x705495C7,
        0x2DF1424B,
        0x9EFC4947,
        0x5C6BFB31,
    ],
    np.uint64,
)
_LOW = np.uint64(0xFFFFFFFF)
_WORDS = len(_SALTS)
# The header in Thrift's compact protocol: field 1 is an i32, the number of bytes; then block, XXH64
# and uncompressed.
_BYTES_FIELD = 0x15
_ONLY_KIND = bytes.fromhex("1c1c00001c1c00001c1c000000")
# A header with the largest number of bytes.
_HEADER = 1 + 5 + len(_ONLY_KIND)

Hashes = npt.NDArray[np.uint64]


def groups_that_may_hold(
    open_file: Callable[[], InputStream],
    metadata: pq.FileMetaData,
    column: str,
    values: Sequence[str | int],
) -> list[int]:
    """The numbers of a file's row groups, without those whose Bloom filter of a top-level column
    excludes every value.

    A filter has no false negatives: a row group that holds a value is always among them. So is one
    without a filter, or with one of a kind that the format does not know yet. The file is opened
    only if it has filters.
    """
    at = next(i for i in range(len(metadata.schema)) if metadata.schema.column(i).path == column)
    chunks = [metadata.row_group(group).column(at) for group in range(metadata.num_row_groups)]
    if not any(chunk.bloom_filter_offset for chunk in chunks):
        return list(range(len(chunks)))
    hashes = _hashes(values, metadata.schema.column(at).physical_type)
    with open_file() as source:
        kept = []
        for group, chunk in enumerate(chunks):
            found = (
                _bitset(source, chunk.bloom_filter_offset) if chunk.bloom_filter_offset else None
            )
            if found is None or _holds_any(found, hashes):
                kept.append(group)
    return kept


def _bitset(source: InputStream, offset: int) -> npt.NDArray[np.uint32] | None:
    """The words of a filter; None for a kind that is not known."""
    source.seek(offset)
    header = source.read(_HEADER)
    if header[0] != _BYTES_FIELD:
        return None
    number, at, shift = 0, 1, 0
    while header[at] & 0x80:
        number, at, shift = number | (header[at] & 0x7F) << shift, at + 1, shift + 7
    length = (number | header[at] << shift) >> 1  # zigzag, and never negative
    end = at + 1 + len(_ONLY_KIND)
    if header[at + 1 : end] != _ONLY_KIND:
        return None
    source.seek(offset + end)
    return np.frombuffer(source.read(length), np.dtype("<u4"))


def _hashes(values: Sequence[str | int], physical_type: str) -> Hashes:
    """XXH64 of the values' plain encodings, of those that the type can have."""
    if physical_type == "BYTE_ARRAY":
        plain = [str(value).encode() for value in values]
    else:
        code, bits = ("<i", 31) if physical_type == "INT32" else ("<q", 63)
        plain = [struct.pack(code, n) for n in map(int, values) if -(2**bits) <= n < 2**bits]
    return np.array([xxhash.xxh64_intdigest(one) for one in plain], np.uint64)


def _holds_any(words: npt.NDArray[np.uint32], hashes: Hashes) -> bool:
    blocks = np.uint64(len(words) // _WORDS)
    first = ((hashes >> np.uint64(32)) * blocks >> np.uint64(32)) * np.uint64(_WORDS)
    bits = ((hashes & _LOW)[:, None] * _SALTS[None, :] & _LOW) >> np.uint64(27)
    chosen = words[first[:, None] + np.arange(_WORDS, dtype=np.uint64)]
    return bool(((chosen >> bits.astype(np.uint32)) & 1).all(axis=1).any())
