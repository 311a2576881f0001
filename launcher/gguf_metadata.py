"""The reader of package ``gguf``, less the vocabulary: it reads tokens one by one, 260,000 in half a minute.

Long arrays are measured and stepped over; their field stays, without its values.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

_LONG = 4096
"""Elements from which on an array is stepped over. Nothing that is kept for each layer is so long."""


class MetadataReader(GGUFReader):
    """A :class:`gguf.GGUFReader` without the values of long arrays."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray[Any, Any]], list[int], list[GGUFValueType]]:
        order = ">" if self.byte_order == "S" else "<"
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.data
        element, count = struct.unpack_from(f"{order}IQ", data, orig_offs)
        kind = GGUFValueType(element)
        if count < _LONG or kind == GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        end = orig_offs + 12
        if kind == GGUFValueType.STRING:
            length = struct.Struct(f"{order}Q")
            for _ in range(count):
                end += 8 + length.unpack_from(data, end)[0]
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, kind]
