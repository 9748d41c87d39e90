"""Print the adoption of another topic, or of a truncated one."""

from __future__ import annotations

from typing import Any

from anabranch.common.output import print_json
from anabranch.offsets.position import ranges_to_keys, size, to_keys
from anabranch.protocol.topic_change import Adopted


def print_adopted(stream: str, topic: str, adopted: Adopted | None, output: str) -> None:
    if output == "json":
        print_json(_view(stream, adopted))
        return
    if adopted is None:
        print(f"{stream}: nothing to adopt: the position belongs to topic {topic}")
        return
    position = ", ".join(f"{p}: {o}" for p, o in to_keys(adopted.position.offsets).items())
    again = "the same topic" if adopted.former_id == adopted.position.topic_id else f"in place of {adopted.former_id}"
    print(f"{stream}: adopted topic id {adopted.position.topic_id} ({again})")
    print(f"{stream}: sealed {', '.join(adopted.sealed)} at the published position; all rows stay served")
    for hour, part in adopted.lost.items():
        print(f"{stream}: hour {hour}: {size(part)} offsets were never read")
    if again == "the same topic":
        print(f"{stream}: records after the end of its log are lost")
    else:
        print(
            f"{stream}: records of {adopted.former_id} after its position are not read; `anabranch adopt` continues "
            "there when the configuration names that topic again"
        )
    print(f"{stream}: continues with hour {adopted.timeline.open} from position {position}")


def _view(stream: str, adopted: Adopted | None) -> dict[str, Any]:
    if adopted is None:
        return {"stream": stream, "adopted": False}
    return {
        "stream": stream,
        "adopted": True,
        "former_topic_id": adopted.former_id,
        "topic_id": adopted.position.topic_id,
        "sealed": list(adopted.sealed),
        "open_hour": adopted.timeline.open,
        "position": to_keys(adopted.position.offsets),
        "lost": {hour: ranges_to_keys(part) for hour, part in adopted.lost.items()},
    }
