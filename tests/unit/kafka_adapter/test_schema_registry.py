"""The registry's client against an HTTP server that a test scripts: what each answer means."""

import base64
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from answering_registry import Answering, answering_registry

from anabranch import config
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.dev.services.processes import HOST, free_port
from anabranch.kafka.schema_registry import RegisteredSchema, SchemaRegistryClient, SubjectVersion


@pytest.fixture
def server() -> Iterator[Answering]:
    with answering_registry() as answering:
        yield answering


def test_a_schema_is_requested_once_and_an_impossible_id_never(server: Answering) -> None:
    server.answers["/schemas/ids/7"] = (200, json.dumps({"schema": '"string"'}))
    registry = server.registry()
    assert registry.schema(7) == registry.schema(7) == RegisteredSchema(7, "AVRO", '"string"')
    assert registry.schema(-1) is None and registry.schema(2**31) is None
    assert server.paths == ["/api/schemas/ids/7"]


def test_references_are_resolved_each_after_its_own(server: Answering) -> None:
    def version(text: str, *references: tuple[str, str, int]) -> tuple[int, str]:
        of = [{"name": n, "subject": s, "version": v} for n, s, v in references]
        return 200, json.dumps({"version": 1, "schema": text, "references": of})

    server.answers["/schemas/ids/7"] = version("main", ("b", "B", 2), ("c", "C", 1))
    server.answers["/subjects/B/versions/2?deleted=true"] = version("of b", ("c", "C", 1))
    server.answers["/subjects/C/versions/1?deleted=true"] = version("of c")
    server.answers["/subjects/main/versions/latest"] = server.answers["/schemas/ids/7"]
    registry, wanted = server.registry(), (("c", "of c"), ("b", "of b"))
    assert registry.schema(7) == RegisteredSchema(7, "AVRO", "main", wanted)
    assert registry.latest("main") == SubjectVersion("main", 1, "AVRO", "main", wanted)
    assert len(server.paths) == 4
    in_context = "/subjects/%3A.eu%3A{}/versions/{}?deleted=true"
    server.answers["/subjects/%3A.eu%3Amain/versions/latest"] = server.answers["/schemas/ids/7"]
    server.answers[in_context.format("B", 2)] = version("eu b", ("c", ":.us:C", 1))
    server.answers["/subjects/%3A.us%3AC/versions/1?deleted=true"] = version("us c")
    of_eu = registry.latest(":.eu:main")
    assert of_eu is not None and of_eu.references == (("c", "us c"), ("b", "eu b"))
    server.answers["/schemas/ids/8"] = version("main", ("d", "D", 1))
    with pytest.raises(ConfigurationError, match=r"subjects/D/versions/1.* found no version"):
        registry.schema(8)
    server.answers["/schemas/ids/9"] = (200, json.dumps({"schema": "", "references": [1]}))
    with pytest.raises(ConfigurationError, match="found references without name, subject"):
        registry.schema(9)


def test_an_unknown_id_is_requested_again(server: Answering) -> None:
    registry = server.registry()
    assert registry.schema(7) is None
    server.answers["/schemas/ids/7"] = (200, json.dumps({"schema": "{}"}))
    assert registry.schema(7) is not None


def test_subjects_of_an_id_count_deleted_versions_too(server: Answering) -> None:
    registry, path = server.registry(), "/schemas/ids/7/versions?deleted=true"
    assert not registry.belongs(7, "a")
    versions = [{"subject": "a", "version": 1}, {"subject": "b", "version": 2}]
    server.answers[path] = (200, json.dumps(versions))
    assert registry.belongs(7, "a") and registry.belongs(7, "b") and registry.belongs(7, "a")
    assert not registry.belongs(7, "c")
    assert server.paths == [f"/api{path}"] * 3


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_errors_that_may_pass(server: Answering, status: int) -> None:
    server.answers["/schemas/ids/7"] = (status, "Bad Gateway")
    with pytest.raises(Transient, match=f"schemas/ids/7: {status}.*transient"):
        server.registry().schema(7)


@pytest.mark.parametrize("status", [401, 403])
def test_a_request_without_access_is_refused(server: Answering, status: int) -> None:
    server.answers["/schemas/ids/7"] = (status, json.dumps({"error_code": status, "message": "no"}))
    found = f"found {status} no; check registry.user and registry.password"
    with pytest.raises(ConfigurationError, match=found) as error:
        server.registry(user="u", password="hunter2").schema(7)
    assert server.authorization == "Basic " + base64.b64encode(b"u:hunter2").decode()
    assert "hunter2" not in str(error.value)


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
def test_another_servers_answer_makes_no_letters(server: Answering, status: int, body: str) -> None:
    """The hazard: a proxy's 404 taken for the registry's word that a schema does not exist."""
    server.answers["/schemas/ids/7"] = (status, body)
    found = "expected the answer of a schema registry's REST API, found"
    with pytest.raises(ConfigurationError, match=found):
        server.registry().schema(7)


def test_a_token_is_sent_and_is_in_no_message(server: Answering) -> None:
    server.answers["/schemas/ids/7"] = (401, "no")
    registry = server.registry(token="hunter2")
    with pytest.raises(ConfigurationError, match=r"found 401.*or registry\.token") as error:
        registry.schema(7)
    assert server.authorization == "Bearer hunter2"
    assert "hunter2" not in str(error.value)


def test_a_registrys_authority_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("jobs").private_key_and_cert_chain_pem.write_to_path(tmp_path / "jobs.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    # The configured authority counts, whatever the environment has.
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "other.pem"))
    files = {"ca": str(tmp_path / "ca.pem"), "certificate": str(tmp_path / "jobs.pem")}
    with answering_registry(context) as server:
        server.answers["/schemas/ids/7"] = (200, json.dumps({"schema": "{}"}))
        assert server.registry(**files).schema(7) is not None
        without_ca = {"certificate": files["certificate"]}
        for given in (without_ca, files | {"ca": str(tmp_path / "none.pem")}):
            with pytest.raises(ConfigurationError, match=r"registry\.ca and registry\.certificate"):
                server.registry(**given).schema(7)
        with pytest.raises((ConfigurationError, Transient)):
            server.registry(ca=files["ca"]).schema(7)


def test_the_latest_version_of_a_subject_is_asked_for_each_time(server: Answering) -> None:
    registry, path = server.registry(), "/subjects/a%2Fb-value/versions/latest"
    assert registry.latest("a/b-value") is None
    first = {"subject": "a/b-value", "id": 7, "version": 1, "schema": "{}"}
    server.answers[path] = (200, json.dumps(first))
    assert registry.latest("a/b-value") == SubjectVersion("a/b-value", 1, "AVRO", "{}")
    server.answers[path] = (200, json.dumps({"version": 2, "schema": "[]", "schemaType": "JSON"}))
    assert registry.latest("a/b-value") == SubjectVersion("a/b-value", 2, "JSON", "[]")
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
    assert registry.schema(7) is not None and registry.schema(8) is None
    server.answers["/schemas/ids/9"] = (503, "no")
    with pytest.raises(Transient, match="transient"):
        registry.schema(9)
    server.answers["/schemas/ids/9"] = (403, "no")
    with pytest.raises(ConfigurationError, match="found 403"):
        registry.schema(9)
    registry = SchemaRegistryClient(config.Registry(url=f"http://{HOST}:{free_port()}"))
    with pytest.raises(Transient, match=r"ask the schema registry for .*refused.*transient"):
        registry.schema(7)
