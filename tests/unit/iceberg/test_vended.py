"""Keys of S3 that a catalog vends: which request is signed by which, and when they are renewed."""

import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from lakes import StreamLake, new_lake
from rest_stand_in import Rest, running_rest

from anabranch.common.errors import Transient
from anabranch.config import S3
from anabranch.iceberg import vended
from anabranch.iceberg.file_io import LakeFileIO, for_tasks, store_of
from anabranch.iceberg.s3 import _VENDED, open_store
from anabranch.iceberg.vended import Keys, Vendor, keys_in

LIFE = 3600.0
# The file access of a warehouse in S3.
OF_S3 = {"py-io-impl": "anabranch.iceberg.file_io.LakeFileIO"}


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[Rest]:
    with running_rest(tmp_path) as rest:
        yield rest


def vend(rest: Rest, token: str, life: float | None = LIFE) -> None:
    """Let the catalog vend a token with each load from now on."""
    rest.config = {"s3.access-key-id": "a", "s3.secret-access-key": "b", "s3.session-token": token}
    if life is not None:
        end = str(int(1000 * (vended.time.time() + life)))
        rest.config["s3.session-token-expires-at-ms"] = end


def after(seconds: float, patch: pytest.MonkeyPatch) -> None:
    """Let the keys' clock be ahead."""
    patch.setattr(vended, "time", SimpleNamespace(time=lambda: time.time() + seconds))


def file_access(lake: StreamLake) -> LakeFileIO:
    io = lake.table().io
    assert isinstance(io, LakeFileIO) and io.vendor is not None
    return io


def token_of(io: LakeFileIO) -> str:
    assert io.vendor is not None
    return io.vendor.current().token


@pytest.fixture
def lake(tmp_path: Path, rest: Rest) -> StreamLake:
    return new_lake(tmp_path, type="rest", uri=rest.url, properties=OF_S3)


@pytest.mark.parametrize(
    ("life", "renewal"), [(3600.0, 3300.0), (45.0, 22.5), (None, 300.0), (-10.0, -10.0)]
)
def test_when_keys_are_renewed(life: float | None, renewal: float) -> None:
    properties = dict(zip(vended.KEY_NAMES, "abc", strict=True))
    if life is not None:
        properties["s3.session-token-expires-at-ms"] = str(int(1000 * (1000 + life)))
    keys = keys_in(properties, 1000.0)
    assert keys is not None and keys.renewal == 1000.0 + renewal
    assert keys_in(properties | {"s3.session-token-expires-at-ms": "0"}, 1.0) is not None
    assert keys_in({}, 1.0) is None


def test_the_keys_of_a_configuration_are_not_vended(rest: Rest, tmp_path: Path) -> None:
    vend(rest, "own")
    lake = new_lake(tmp_path, type="rest", uri=rest.url, properties=OF_S3 | rest.config)
    io = lake.table().io
    assert isinstance(io, LakeFileIO) and io.vendor is None
    # Temporary keys that nothing renews sign our own requests too.
    assert isinstance(store_of(io)._vended, Keys)


def test_a_load_renews_keys(rest: Rest, lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    vend(rest, "first")
    io = file_access(lake)
    opened = io.s3("bucket")
    vend(rest, "second")
    later = file_access(lake)
    # Else each load of the table would open new connections.
    assert token_of(io) == token_of(later) == "first"
    assert later.s3("bucket") is opened
    after(LIFE - 200, monkeypatch)
    vend(rest, "third")
    assert token_of(io) == token_of(later) == "third"
    assert later.s3("bucket") is not opened
    vend(rest, "fourth")
    assert token_of(file_access(lake)) == "third"


def test_copies_renew_keys(rest: Rest, lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    vend(rest, "first")
    io = file_access(lake)
    copied = pickle.dumps(for_tasks(io))
    vended._newest_of.cache_clear()
    task = pickle.loads(copied)
    assert token_of(task) == "first"
    after(LIFE, monkeypatch)
    vend(rest, "second")
    assert token_of(task) == "second"
    vended._newest_of.cache_clear()
    # The keys in the copy have expired since.
    assert token_of(pickle.loads(copied)) == "second"


def test_keys_that_s3_has_refused_are_not_used_again(rest: Rest, lake: StreamLake) -> None:
    vend(rest, "first", None)
    io = file_access(lake)
    assert token_of(io) == "first" and io.vendor is not None
    io.vendor.expire()
    vend(rest, "second", None)
    assert token_of(io) == "second"


def test_a_catalog_that_is_away_is_asked_again_while_keys_are_valid(
    rest: Rest, lake: StreamLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    vend(rest, "first", 60)
    io = file_access(lake)

    def refuse(vendor: object) -> None:
        raise Transient("away")

    monkeypatch.setattr(vended._Newest, "_load", refuse)
    after(40, monkeypatch)
    assert token_of(io) == "first"
    after(60, monkeypatch)
    with pytest.raises(Transient):
        token_of(io)
    with pytest.raises(OSError, match="away"):
        io.s3("bucket")


def test_one_client_signs_by_the_keys_of_each_table() -> None:
    shared = open_store(S3(endpoint="https://127.0.0.1:9"))
    seen = []

    def note(request: object, **_: object) -> None:
        keys = _VENDED.get()
        seen.append(keys.current().token if keys is not None else None)
        raise InterruptedError

    shared._client.meta.events.register_last("before-sign.s3", note)
    stores = [shared.with_keys(Keys("a", "b", token)) for token in ("one", "two")]
    try:
        for store in (*stores, shared):
            assert store._client is shared._client
            listing = store.list_objects("bucket", "")
            with pytest.raises(InterruptedError):
                next(listing)
            assert _VENDED.get() is None
    finally:
        shared._client.meta.events.unregister("before-sign.s3", note)
    assert seen == ["one", "two", None]


def test_no_key_is_in_a_text() -> None:
    keys = Keys("access", "secret-text", "token-text")
    vendor = Vendor("lake", (("credential", "id:secret-text"),), ("games", "events"))
    assert not {"secret-text", "token-text"} & set(f"{keys} {vendor}".replace("'", " ").split())
