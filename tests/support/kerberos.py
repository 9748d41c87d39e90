"""A Kerberos KDC (Debian's krb5-kdc), keytabs of a broker and a client, the package gssapi."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import programs
from maven import cached
from servers import serving

from anabranch.dev.services.processes import HOST, free_port

REALM, SERVICE, USER = "TEST.LOCAL", "kafka/localhost", "anabranch"
_GSSAPI = "gssapi==1.12.0"
_DEBIAN = ("krb5-kdc", "krb5-admin-server", "krb5-user", "libkrb5-dev", "gcc")
_KRB5 = """[libdefaults]
 default_realm = {realm}
 dns_lookup_kdc = false
 dns_lookup_realm = false
 dns_canonicalize_hostname = false
 rdns = false
 udp_preference_limit = 1
[realms]
 {realm} = {{
  kdc = {host}:{port}
 }}
[domain_realm]
 localhost = {realm}
"""
_KDC = """[kdcdefaults]
 kdc_listen = {host}:{port}
 kdc_tcp_listen = {host}:{port}
[realms]
 {realm} = {{
  database_name = {folder}/principal
  key_stash_file = {folder}/stash
  acl_file = {folder}/acl
  max_life = {seconds}s
 }}
"""


@dataclass(frozen=True)
class Realm:
    """A running KDC, whose tickets live some seconds."""

    folder: Path

    @property
    def conf(self) -> Path:
        return self.folder / "krb5.conf"

    @property
    def service_keytab(self) -> Path:
        return self.folder / "kafka.keytab"

    @property
    def keytab(self) -> Path:
        return self.folder / "anabranch.keytab"


def _install() -> None:
    path = f"{os.environ['PATH']}:/usr/sbin"
    if shutil.which("krb5kdc", path=path) is None:
        programs.install(*_DEBIAN)
    missing = "expected krb5kdc on the PATH, found none; install " + " ".join(_DEBIAN)
    assert shutil.which("krb5kdc", path=path), missing


def gssapi_folder() -> Path:
    """Return a folder with the package gssapi, compiled once into the cache: the extra `kerberos`
    needs libkrb5-dev and a compiler, which the tests' environment does without."""
    _install()

    def fill(folder: Path) -> None:
        command = (sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable)
        programs.output_of(*command, "--target", folder, _GSSAPI, seconds=600)

    return cached(f"{_GSSAPI}-{sys.version_info.major}.{sys.version_info.minor}", 900, fill)


@contextmanager
def running_kdc(folder: Path, seconds: int) -> Iterator[Realm]:
    """Run a new KDC within a `with`, whose tickets live so long."""
    _install()
    folder.mkdir(parents=True, exist_ok=True)
    realm, port = Realm(folder), free_port()
    words = {"realm": REALM, "host": HOST, "port": port, "folder": folder, "seconds": seconds}
    realm.conf.write_text(_KRB5.format(**words))
    (folder / "kdc.conf").write_text(_KDC.format(**words))
    (folder / "acl").touch()
    given = {"KRB5_CONFIG": str(realm.conf), "KRB5_KDC_PROFILE": str(folder / "kdc.conf")}
    given["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    ask = partial(programs.output_of, env=os.environ | given, seconds=60)
    ask("kdb5_util", "create", "-s", "-r", REALM, "-P", "master-of-the-test")
    for principal, keytab in ((SERVICE, realm.service_keytab), (USER, realm.keytab)):
        ask("kadmin.local", "-q", f"addprinc -randkey {principal}")
        ask("kadmin.local", "-q", f"ktadd -k {keytab} {principal}")

    def answers() -> bool:
        probe = ["kinit", "-c", f"FILE:{folder}/probe", "-kt", str(realm.keytab), USER]
        done = subprocess.run(probe, env=os.environ | given, capture_output=True, timeout=30)
        return done.returncode == 0

    kdc = shutil.which("krb5kdc", path=given["PATH"]) or "krb5kdc"
    command = [kdc, "-n", "-P", str(folder / "kdc.pid")]
    with serving(command, folder / "kdc.log", answers, 60, given):
        yield realm
