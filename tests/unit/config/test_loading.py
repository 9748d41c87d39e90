"""Valid configuration, and for every mistake the file, the key, what is expected and found."""

import io
import logging
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from anabranch import config
from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.common.logs import configure_logging

ENVIRONMENT = """
kafka: {bootstrap_servers: "127.0.0.1:1"}
catalog: {name: lake, uri: "sqlite:///c.db", warehouse: "file:///w"}
"""
STREAM = {
    "topic": "game_events", "table": "games.game_events", "key": "event_id",
    "schema": "event_id STRING NOT NULL, event_time TIMESTAMP",
}  # fmt: skip
SHIPPED = Path(__file__).parents[3] / "conf"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "streams").mkdir()
    (tmp_path / "anabranch.yaml").write_text(ENVIRONMENT)
    return tmp_path


def stream(conf: Path, **values: str) -> config.Stream:
    lines = [f"{key}: {value}" for key, value in (STREAM | values).items() if value]
    (conf / "streams" / "s.yaml").write_text("\n".join(lines))
    return config.load_stream("s", conf)


def test_the_files_that_ship_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    environment = config.load_environment(SHIPPED)
    assert environment.catalog.warehouse == "s3://anabranch/warehouse"
    assert environment.s3.secret_key is not None
    assert environment.s3.secret_key.get_secret_value() == "anabranch-local"
    assert "anabranch-local" not in repr(environment)
    assert config.stream_names(SHIPPED) == ("game_events",)
    for name in config.stream_names(SHIPPED):
        loaded = config.load_stream(name, SHIPPED)
        assert loaded.expectations is not None and loaded.expectations.is_file()
    assert (loaded.dead_letters_table, loaded.hours_table) == (
        "games.game_events_dead_letters", "games.game_events_hours",
    )  # fmt: skip
    assert loaded.speed.trigger == timedelta(seconds=2)
    assert loaded.event_time is not None and loaded.event_time.past == timedelta(days=30)


def test_streams_without_a_key_of_plain_protobuf_and_of_raw_bytes(conf: Path) -> None:
    loaded = stream(conf, key="none", batch="{lookback_hours: 24}")
    assert (loaded.key, loaded.lookback_hours, loaded.batch.lookback_hours) == ((), 0, 24)
    assert stream(conf, schema="none STRING", key="[none]").key == ("none",)
    form = "{type: protobuf, descriptor: shop.desc, message: shop.Order}"
    (conf / "streams" / "shop.desc").write_bytes(b"")
    loaded = stream(conf, format=form)
    assert loaded.format.descriptor == conf / "streams" / "shop.desc"
    assert not loaded.format.needs_registry
    raw = stream(conf, format="raw", schema="key STRING, value BINARY NOT NULL", key="[key, value]")
    assert [(c.name, c.type) for c in raw.columns] == [("key", "string"), ("value", "binary")]


@pytest.mark.parametrize(
    ("target", "size"), [("256 MB", 256_000_000), ("64MiB", 2**26), ("1 GB", 10**9), (10**6, 10**6)]
)
def test_a_target_is_in_bytes_or_has_a_unit(conf: Path, target: object, size: int) -> None:
    assert stream(conf, files=f"{{target: {target}}}").files.target == size


def test_files_of_a_stream_and_settings_of_spark(conf: Path) -> None:
    files = stream(conf).files
    assert (files.sort, files.bloom) == ((), ())
    files = stream(conf, files="{sort: event_id, bloom: [event_id, event_time]}").files
    assert (files.sort, files.bloom) == (("event_id",), ("event_id", "event_time"))
    text = "spark: {conf: {spark.sql.shuffle.partitions: 4, spark.x: true}}"
    (conf / "anabranch.yaml").write_text(ENVIRONMENT + text)
    conf_of_spark = config.load_environment(conf).spark.conf
    assert conf_of_spark == {"spark.sql.shuffle.partitions": "4", "spark.x": "true"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("json", ("json", None, ",")),
        ("csv", ("csv", None, ",")),
        ("{type: csv, delimiter: ;}", ("csv", None, ";")),
        ('{type: csv, delimiter: "\\t"}', ("csv", None, "\t")),
        ("avro", ("avro", None, ",")),
        ("{type: json_schema, subject: events-value}", ("json_schema", "events-value", ",")),
    ],
)
def test_formats(conf: Path, text: str, expected: tuple[str, str | None, str]) -> None:
    (conf / "anabranch.yaml").write_text(ENVIRONMENT + "registry: {url: 'http://127.0.0.1:1/'}")
    settings = stream(conf, format=text).format
    assert (settings.type, settings.subject, settings.delimiter) == expected


def test_a_registry_has_servers_and_a_user(conf: Path) -> None:
    def load(registry: str) -> config.Registry:
        (conf / "anabranch.yaml").write_text(f"{ENVIRONMENT}registry: {registry}")
        found = config.load_environment(conf).registry
        assert found is not None
        return found

    several = load("{url: 'http://one:8081/, https://[::1]:8081/api/'}")
    assert several.url == "http://one:8081,https://[::1]:8081/api"
    own = load("{url: 'https://r.example.com/apis/', user: u, password: p}")
    assert (own.url, own.user) == ("https://r.example.com/apis", "u")
    assert "password=SecretStr('**********')" in repr(own)


def test_values_read_the_environment_once(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TOPIC", "from_outside")
    monkeypatch.delenv("TEST_UNSET", raising=False)
    loaded = stream(conf, topic='"${TEST_TOPIC}"', table='"${TEST_UNSET:-games}.t_${TEST_TOPIC}"')
    assert (loaded.topic, loaded.table) == ("from_outside", "games.t_from_outside")
    monkeypatch.setenv("TEST_EMPTY", "")
    with pytest.raises(ConfigurationError, match=r"found nothing of \$\{TEST_EMPTY\}"):
        stream(conf, topic='"${TEST_EMPTY:-default}"')
    loaded = stream(conf)
    with pytest.raises(ValidationError, match="frozen"):
        loaded.topic = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 second", timedelta(seconds=1)),
        ("2 seconds", timedelta(seconds=2)),
        ("5 minutes", timedelta(minutes=5)),
        ("1 hour", timedelta(hours=1)),
        ("30 days", timedelta(days=30)),
        (" 2weeks ", timedelta(weeks=2)),
        ("1000 years", timedelta(days=365_000)),
    ],
)
def test_durations(text: str, expected: timedelta) -> None:
    assert config.parse_duration(text) == expected


@pytest.mark.parametrize("value", ["", "2", 2, "2 s", "-1 hours", "1.5 hours", "1 month", None])
def test_invalid_durations(value: object) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        config.parse_duration(value)


def test_an_unknown_name_is_reported_with_the_known_ones(conf: Path, tmp_path: Path) -> None:
    stream(conf)
    found = r"stream 'other': expected the file .*, found none \(known streams: s"
    with pytest.raises(ConfigurationError, match=found):
        config.load_stream("other", conf)
    found = r"expected a name of letters, digits and underscores, found '\.\./x'"
    with pytest.raises(ConfigurationError, match=found):
        config.load_stream("../x", conf)
    with pytest.raises(ConfigurationError, match=r"found none \(choose the folder with --conf\)"):
        config.load_environment(tmp_path / "nowhere")


def test_environment_variables_choose_the_folder_and_the_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ANABRANCH_CONF", raising=False)
    assert config.resolve_folder() == Path("conf")
    monkeypatch.setenv("ANABRANCH_CONF", "elsewhere")
    assert config.resolve_folder() == Path("elsewhere")
    assert config.resolve_folder("here") == Path("here")
    assert config.load_environment(SHIPPED).lineage.url == ""
    monkeypatch.setenv("OPENLINEAGE_URL", "https://lineage.example.com/")
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "hunter2")
    lineage = config.load_environment(SHIPPED).lineage
    assert lineage.url == "https://lineage.example.com"
    assert lineage.api_key is not None and lineage.api_key.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(lineage)


@pytest.mark.parametrize(
    ("schema", "event_time", "dates"),
    [
        ("event_id STRING, at TIMESTAMP NOT NULL", "{column: at, past: 30 days, future: 1 hour}", 32),
        ("event_id STRING, at TIMESTAMP NOT NULL", "{column: at, past: 23 hours, future: 23 hours}", 3),
        ("event_id STRING, at TIMESTAMP NOT NULL", "{column: at, past: 30 days}", None),
        ("event_id STRING, at TIMESTAMP NOT NULL", "{column: at, future: 1 hour}", None),
        ("event_id STRING, at TIMESTAMP", "{column: at, past: 30 days, future: 1 hour}", None),
        ("event_id STRING", None, None),
    ],
)  # fmt: skip
def test_how_many_dates_an_hour_can_contain(
    conf: Path, schema: str, event_time: str | None, dates: int | None
) -> None:
    assert stream(conf, schema=schema, event_time=event_time or "").most_event_dates == dates


SECRET = "hunter2/hunter2@x"


@pytest.mark.parametrize(
    ("section", "replaced"),
    [
        ("", {"kafka: {": 'kafka: {security: {sasl.password: "${PASSWORD}"x}, '}),
        ("s3: {secret_key: *hunter2}", {}),
        ("s3: {secret_key: !hunter2 x}", {}),
        ('s3: {secret_key: "hunter2 \\hunter2"}', {}),
        ("s3: {secret_key: hunter2, secret_key: hunter2}", {}),
        ('s3: "${PASSWORD}"', {}),
        ("s3: hunter2", {}),
        ('s3: {secretkey: "${PASSWORD}"}', {}),
        ("s3: {endpoint: 'http://u:${PASSWORD}@h:1'}", {}),
        ("secret: {key: hunter2}", {}),
        ('lineage: {timeout: "${PASSWORD}"}', {}),
        ('lineage: {url: "${PASSWORD}"}', {}),
        ('search: {url: "http://h", user: u, password: "${PASSWORD}", api_key: "${PASSWORD}"}', {}),
        ('search: {url: "http://h", password: "${PASSWORD}"}', {}),
        ("spark: {conf: hunter2}", {}),
        ("", {"sqlite:///c.db": "mysql://u:${PASSWORD}@h/c"}),
        ("", {"sqlite:///c.db": "postgresql://u:${PASSWORD}@h/c"}),
        ("", {"name: lake": "name: lake, type: rest", "sqlite:///c.db": "http://u:${PASSWORD}@h"}),
        ("", {"name: lake": 'name: "${PASSWORD}"'}),
        ("", {"127.0.0.1:1": "${PASSWORD}", "name: lake": "name: l-l"}),
    ],
)
def test_no_mistake_shows_a_secret(
    conf: Path, monkeypatch: pytest.MonkeyPatch, section: str, replaced: dict[str, str]
) -> None:
    """Neither the message nor Python's traceback of it and its causes contains the secret."""
    monkeypatch.setenv("PASSWORD", SECRET)
    text = ENVIRONMENT + section
    for right, wrong in replaced.items():
        text = text.replace(right, wrong)
    (conf / "anabranch.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as error:
        config.load_environment(conf)
    said = "".join(traceback.format_exception(error.value))
    for part in ("hunter2", "ter2@"):
        assert part not in str(error.value) and part not in said.split("\nanabranch.errors")[-1]
    assert "input_value" not in said and "During handling" not in said


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"key": '"${PASSWORD}"'}, "found '${PASSWORD}'"),
        ({"files": '{sort: ["${PASSWORD}", "${PASSWORD}"]}'}, "files.sort: expected each column once, found list"),
        (
            {"egress": ("[{name: a, root: &r 's3://bkt/${PASSWORD}'}, {name: b, root: *r}]")},
            "found 's3://bkt/${PASSWORD}' twice",
        ),
    ],
    ids=["key", "list", "egress"],
)  # fmt: skip
def test_no_mistake_of_a_stream_repeats_the_value_of_a_variable(
    conf: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, str], found: str
) -> None:
    """Checks that compare several keys see only the values of the keys."""
    monkeypatch.setenv("PASSWORD", "hunter2")
    with pytest.raises(ConfigurationError) as error:
        stream(conf, **values)
    assert "ter2" not in str(error.value) and found in str(error.value)


def test_secrets_in_other_messages_are_hidden(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [f"secret-{number}/@x" for number in range(4)]
    (conf / "anabranch.yaml").write_text(
        ENVIRONMENT.replace("sqlite:///c.db", f"postgresql+psycopg2://u:{secrets[0]}@h/c").replace(
            "kafka: {",
            f"""kafka: {{security: {{sasl.mechanism: PLAIN, sasl.username: user-of-kafka,
            sasl.password: {secrets[1]}, ssl.key.password: {secrets[2]}}}, """,
        )
        + f"s3: {{access_key: access-key-id, secret_key: {secrets[3]}}}\n"
    )
    config.load_environment(conf)
    plain = "SASL_SSL user-of-kafka access-key-id"
    said = f"{plain} {' '.join(secrets)}"
    assert str(Terminal(said)) == f"{plain} *** *** *** ***"
    stream = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        for as_json in (True, False):
            configure_logging(as_json=as_json)
            try:
                raise OSError(said)
            except OSError as error:
                logging.getLogger("anabranch").warning("%s", said, exc_info=error)
    assert stream.getvalue().count("SASL_SSL") >= 4
    assert not [s for s in secrets if s in stream.getvalue()]
