"""Configuration: parsed and validated once, immutable.

`load_environment` reads `conf/anabranch.yaml`, `load_stream` a file of `conf/streams/`. A mistake
raises ConfigurationError, which names the file, the key, and what was expected and found. `${NAME}`
and `${NAME:-default}` in values are replaced from the process environment at load time only.
"""

from __future__ import annotations

from anabranch.common.errors import ConfigurationError
from anabranch.config.environment import (
    S3,
    Catalog,
    Environment,
    Kafka,
    Lineage,
    Registry,
    SearchCluster,
    Spark,
)
from anabranch.config.family import (
    Family,
    FamilyKeys,
    FamilyMember,
    Members,
    Selected,
    broken,
    expand,
    load_families,
    load_family,
    loaded,
    select_streams,
)
from anabranch.config.loading import (
    family_names,
    load_environment,
    load_stream,
    shared_tables,
    stream_file_stamp,
    stream_names,
)
from anabranch.config.plain import UNREADABLE, group_in_file, parse_duration, resolve_folder
from anabranch.config.stream import (
    RESERVED_COLUMNS,
    TAKEN_COLUMNS,
    EventTime,
    Files,
    Maintain,
    Slo,
    Speed,
    Stream,
    SubjectSchema,
)
from anabranch.config.views import View
