"""The registry's client against an HTTP server that answers what a test says: what each answer
means."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest
from answering_registry import Answering, answering_registry

from anabranch import config
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.dev.services.processes import HOST, free_port
from anabranch.kafka.schema_registry import RegisteredSchema, SchemaRegistryClient, SubjectVersion


@pytest.fixture
def server() -> Iterator[Answering]:
    with answering_registry() as answering:
        yield answering


def test_a_schema_is_requested_once(server: Answering) -> None:
    server.answers["/schemas/ids/7"] = (200, json.dumps({"schema": '"string"'}))
    registry = server.registry()
    assert (
        registry.schema(7) == registry.schema(7) == RegisteredSchema(7, "AVRO", '"string"', False)
    )
    assert server.paths == ["/api/schemas/ids/7"]


def test_type_and_references(server: Answering) -> None:
    answer = {
        "schema": "{}",
        "schemaType": "JSON",
        "references": [{"name": "a", "subject": "b", "version": 1}],
    }
    server.answers["/schemas/ids/7"] = (200, json.dumps(answer))
    assert server.registry().schema(7) == RegisteredSchema(7, "JSON", "{}", True)


def test_an_unknown_id_is_requested_again(server: Answering) -> None:
    registry = server.registry()
    assert registry.schema(7) is None
    server.answers["/schemas/ids/7"] = (200, json.dumps({"schema": "{}"}))
    assert registry.schema(7) is not None


def test_impossible_schema_ids_are_not_requested(server: Answering) -> None:
    registry = server.registry()
    assert registry.schema(-1) is None and registry.schema(2**31) is None
    assert server.paths == []


def test_subjects_of_an_id_count_deleted_versions_and_are_requested_until_found(
    server: Answering,
) -> None:
    registry, path = server.registry(), "/schemas/ids/7/versions?deleted=true"
    assert not registry.belongs(7, "a")
    server.answers[path] = (
        200,
        json.dumps([{"subject": "a", "version": 1}, {"subject": "b", "version": 2}]),
    )
    assert registry.belongs(7, "a") and registry.belongs(7, "b") and registry.belongs(7, "a")
    assert not registry.belongs(7, "c")
    assert server.paths == [f"/api{path}"] * 3


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_errors_that_may_pass(server: Answering, status: int) -> None:
    server.answers["/schemas/ids/7"] = (status, "Bad Gateway")
    with pytest.raises(Transient, match=f"schemas/ids/7: {status}.*transient"):
        server.registry().schema(7)


def test_no_listener_is_a_transient_error() -> None:
    registry = SchemaRegistryClient(config.Registry(url=f"http://{HOST}:{free_port()}"))
    with pytest.raises(Transient, match=r"ask the schema registry for .*refused.*transient"):
        registry.schema(7)


@pytest.mark.parametrize("status", [401, 403])
def test_a_request_without_access_is_refused(server: Answering, status: int) -> None:
    server.answers["/schemas/ids/7"] = (status, json.dumps({"error_code": status, "message": "no"}))
    with pytest.raises(
        ConfigurationError, match=f"found {status} no; check registry.user and registry.password"
    ):
        server.registry(user="u", password="hunter2").schema(7)
    assert server.authorization == "Basic " + base64.b64encode(b"u:hunter2").decode()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "<html>Not Found</html>"),
        (404, json.dumps({"error_code": 404, "message": "HTTP 404 Not Found"})),
        (200, "<html>Welcome</html>"),
        (200, json.dumps({"subject": "a"})),
        (200, json.dumps(["a"])),
        (400, json.dumps({"message": "what?"})),
    ],
)
def test_an_answer_of_another_server_makes_no_dead_letters(
    server: Answering, status: int, body: str
) -> None:
    """The hazard: a proxy's 404 taken for the registry's word that a schema does not exist."""
    server.answers["/schemas/ids/7"] = (status, body)
    with pytest.raises(
        ConfigurationError, match="expected the answer of a schema registry's REST API, found"
    ):
        server.registry().schema(7)


def test_a_password_is_in_no_message(server: Answering) -> None:
    server.answers["/schemas/ids/7"] = (403, "no")
    with pytest.raises(ConfigurationError) as error:
        server.registry(user="u", password="hunter2").schema(7)
    assert "hunter2" not in str(error.value)


def test_the_latest_version_of_a_subject_is_asked_for_each_time(server: Answering) -> None:
    registry, path = server.registry(), "/subjects/a%2Fb-value/versions/latest"
    assert registry.latest("a/b-value") is None
    server.answers[path] = (
        200,
        json.dumps({"subject": "a/b-value", "id": 7, "version": 1, "schema": "{}"}),
    )
    assert registry.latest("a/b-value") == SubjectVersion("a/b-value", 1, "AVRO", "{}", False)
    more = {"version": 2, "schema": "[]", "schemaType": "JSON", "references": [{"name": "a"}]}
    server.answers[path] = (200, json.dumps(more))
    assert registry.latest("a/b-value") == SubjectVersion("a/b-value", 2, "JSON", "[]", True)
    server.answers[path] = (200, json.dumps({"schema": "{}"}))
    with pytest.raises(ConfigurationError, match="found no version of a subject"):
        registry.latest("a/b-value")


def test_a_subject_of_a_context_has_that_contexts_ids(server: Answering) -> None:
    """The hazard: id 1 of the default context, with its fields in another order."""
    of_context = "subject=%3A.eu%3Aorders-value"
    server.answers["/schemas/ids/1"] = (200, json.dumps({"schema": '"default"'}))
    server.answers[f"/schemas/ids/1?{of_context}"] = (200, json.dumps({"schema": '"eu"'}))
    versions = json.dumps([{"subject": ":.eu:orders-value", "version": 1}])
    server.answers[f"/schemas/ids/1/versions?deleted=true&{of_context}"] = (200, versions)
    registry = server.registry()
    for subject, text in ((None, "default"), (":.eu:orders-value", "eu"), ("a", "default")):
        schema = registry.schema(1, subject)
        assert schema is not None and schema.text == f'"{text}"'
    assert registry.belongs(1, ":.eu:orders-value") and not registry.belongs(1, "orders-value")


def test_another_server_of_the_registry_is_asked_if_one_does_not_answer(server: Answering) -> None:
    server.answers["/schemas/ids/7"] = (200, json.dumps({"schema": "{}"}))
    away = f"http://{HOST}:{free_port()}"
    registry = SchemaRegistryClient(config.Registry(url=f"{away},{server.url}"))
    assert registry.schema(7) is not None
    assert registry.schema(8) is None
    server.answers["/schemas/ids/9"] = (503, "no")
    with pytest.raises(Transient, match="transient"):
        registry.schema(9)
    server.answers["/schemas/ids/9"] = (403, "no")
    with pytest.raises(ConfigurationError, match="found 403"):
        registry.schema(9)
