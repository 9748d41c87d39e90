"""Write the SBOM (CycloneDX) and the list of licenses of the packages in uv.lock and of the jars:
`scripts/sbom.py FOLDER`. `make dist` runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
CYCLONEDX = ("tool", "run", "--from", "cyclonedx-bom==7.5.0", "cyclonedx-py", "environment")


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": f"{temporary}/venv"}
        sync = ("sync", "--frozen", "--quiet", "--no-dev", "--all-extras", "--no-extra", "kerberos")
        subprocess.run([UV, *sync], cwd=ROOT, env=environment, check=True)
        command = [UV, *CYCLONEDX, "--pyproject", "pyproject.toml", f"{temporary}/venv"]
        listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    bom = json.loads(listed)
    bom["components"] += jars()
    name = f"anabranch-{bom['metadata']['component']['version']}"
    (folder / f"{name}.cdx.json").write_text(json.dumps(bom, indent=1), encoding="utf-8")
    lines = [f"{one['name']} {one['version']}: {license_of(one)}" for one in bom["components"]]
    text = "\n".join(sorted(lines, key=str.casefold))
    (folder / "THIRD-PARTY.txt").write_text(text + "\n", encoding="utf-8")


def jars() -> list[dict[str, Any]]:
    """Return a component for each jar that conf/jvm pins; their licenses are in the jars."""
    found = {}
    for line in (ROOT / "conf" / "jvm" / "jars.sha256").read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"(\w{64})  [^/]+/(.+?)-(\d[^/]*)\.jar", line):
            digest, name, version = match.groups()
            found[digest] = {
                "type": "library",
                "bom-ref": f"jar:{name}@{version}",
                "name": name,
                "version": version,
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
    return list(found.values())


def license_of(component: dict[str, Any]) -> str:
    found = []
    for one in component.get("licenses", ()):
        given = one.get("license", {})
        # A license's whole text is no name.
        name = one.get("expression") or given.get("id") or given.get("name", "").splitlines()[:1]
        found.append(name if isinstance(name, str) else " ".join(name))
    return "; ".join(dict.fromkeys(filter(None, found))) or "see the jar"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
