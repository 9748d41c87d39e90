"""Protobuf's types from text, and values in the wire format."""

import base64
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import message_factory
from wire import wired

from anabranch.decode import protobuf

HEAD = 'syntax = "proto3"; package shop; import "google/protobuf/timestamp.proto"; '


@cache
def descriptors(text: str) -> str:
    """Compile a file, and return the descriptors of it and its imports, Base64."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.proto").write_text(text)
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--include_imports"]
        command += [f"--descriptor_set_out={folder}/set", "a.proto"]
        subprocess.run(command, check=True)
        return base64.b64encode((Path(folder) / "set").read_bytes()).decode()


def type_of(text: str, name: str) -> Any:
    """Return the class of a file's message."""
    return message_factory.GetMessageClass(protobuf.message_of(descriptors(text), name))


def indexed(id: int, message: Any, *indexes: int) -> bytes:
    """Return a message in the wire format, with the indexes of its type."""
    head = b"\0" if indexes in ((), (0,)) else bytes(2 * n for n in (len(indexes), *indexes))
    payload = message if isinstance(message, bytes) else message.SerializeToString()
    return wired(id, head + payload)
