"""Translation of `kafka.security`, which has the Java client's properties, for each client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anabranch.common.errors import ConfigurationError
from anabranch.config import Kafka
from anabranch.config.mistakes import unknown_key

_KAFKA_PYTHON = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.truststore.location": "ssl_cafile",
    "ssl.keystore.location": "ssl_certfile",
    "ssl.key.password": "ssl_password",
}
_JAAS = "org.apache.kafka.common.security"


def kafka_python_settings(kafka: Kafka) -> dict[str, Any]:
    """Return kafka-python's arguments for the configured brokers. Raises ConfigurationError for an
    unknown key or a missing file."""
    settings: dict[str, Any] = {"bootstrap_servers": kafka.bootstrap_servers.split(",")}
    for key, value in kafka.security.items():
        if key not in _KAFKA_PYTHON:
            mistake = unknown_key(key, sorted(_KAFKA_PYTHON), f"kafka.security.{key}")
            raise ConfigurationError(mistake)
        settings[_KAFKA_PYTHON[key]] = value.get_secret_value()
        if key.endswith(".location") and not Path(value.get_secret_value()).is_file():
            raise ConfigurationError(f"kafka.security: {key}: expected a file, found none")
    return settings


def spark_options(kafka: Kafka) -> dict[str, str]:
    """Return the Java client's properties for the configured brokers, as options of Spark's Kafka
    source."""
    options = {"kafka.bootstrap.servers": kafka.bootstrap_servers}
    security = {key: value.get_secret_value() for key, value in kafka.security.items()}
    user, password = security.pop("sasl.username", None), security.pop("sasl.password", None)
    if user is not None and password is not None:
        module = (
            "scram.ScramLoginModule"
            if "SCRAM" in security.get("sasl.mechanism", "")
            else "plain.PlainLoginModule"
        )
        quoted = [value.replace("\\", "\\\\").replace('"', '\\"') for value in (user, password)]
        options["kafka.sasl.jaas.config"] = (
            f'{_JAAS}.{module} required username="{quoted[0]}" password="{quoted[1]}";'
        )
    for store in ("truststore", "keystore"):
        if f"ssl.{store}.location" in security:
            options[f"kafka.ssl.{store}.type"] = "PEM"
    return options | {f"kafka.{key}": value for key, value in security.items()}
