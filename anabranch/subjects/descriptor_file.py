"""The descriptor file of a stream of plain Protobuf messages."""

from __future__ import annotations

import base64

from anabranch.common.errors import ConfigurationError
from anabranch.config import Stream
from anabranch.decode import protobuf
from anabranch.decode.avro_names import Incompatible
from anabranch.decode.reading import columns_of


def read_descriptors(stream: Stream) -> str:
    """Return the content of the stream's descriptor file, Base64. Raises ConfigurationError if the
    file cannot be read, or the stream's columns cannot be read from its message."""
    settings = stream.format
    assert settings.descriptor is not None and settings.message is not None
    try:
        text = base64.b64encode(settings.descriptor.read_bytes()).decode()
        protobuf.plan(text, settings.message, columns_of(stream.record_columns))
    except (OSError, Incompatible) as error:
        raise ConfigurationError(
            f"stream {stream.name}: format.descriptor {settings.descriptor}, message "
            f"{settings.message}: {error}; make the file with `protoc --include_imports "
            "--descriptor_set_out`, or correct the columns"
        ) from None
    return text
