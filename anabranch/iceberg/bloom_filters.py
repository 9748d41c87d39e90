"""Parquet's Bloom filters: they exclude row groups that cannot contain given values. PyArrow writes
them but does not read them.

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
# The header in Thrift's compact protocol: field 1 (i32), the filter's bytes; then the kinds: block,
# XXH64, uncompressed.
_BYTES_FIELD = 0x15
_ONLY_KIND = bytes.fromhex("1c1c00001c1c00001c1c000000")
# The maximum length of a header.
_HEADER = 1 + 5 + len(_ONLY_KIND)

Hashes = npt.NDArray[np.uint64]


def groups_that_may_hold(
    open_file: Callable[[], InputStream],
    metadata: pq.FileMetaData,
    column: str,
    values: Sequence[str | int],
) -> list[int]:
    """Return the numbers of a file's row groups, except those whose Bloom filter of a top-level
    column excludes every value.

    A filter has no false negatives, so every row group that contains a value is returned. Row
    groups without a filter, or with one of an unknown kind, are returned too. The file is opened
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
    """Return the words of a filter; None for an unknown kind."""
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
    """Return the XXH64 of the plain encoding of each value within the type's range."""
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
