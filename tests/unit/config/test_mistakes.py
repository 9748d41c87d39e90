"""Each mistake of mistakes.yaml is refused with the whole message: expected and found, once."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from anabranch.common.errors import ConfigurationError
from anabranch.config import load_environment, load_family, load_stream
from batch_layer.quality.suite import load_suite

_TEXT = Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8")
_CASES = yaml.safe_load(_TEXT.replace("GX_VERSION", version("great-expectations")))
_FILES = {"environment": "anabranch.yaml", "suite": "streams/s.expectations.yaml"}
_LOADERS: dict[str, Callable[[Path], object]] = {
    "environment": load_environment,
    "family": lambda conf: load_family("s", conf),
    "suite": lambda conf: load_suite(conf / _FILES["suite"]),
}


@pytest.mark.parametrize(
    ("base", "case"),
    [(base, case) for base, cases in _CASES["mistakes"].items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else value["message"][:60],
)
def test_a_mistake_has_this_message(tmp_path: Path, base: str, case: dict[str, Any]) -> None:
    file = tmp_path / _FILES.get(base, "streams/s.yaml")
    file.parent.mkdir(exist_ok=True)
    (tmp_path / "anabranch.yaml").write_text(yaml.safe_dump(_CASES["bases"]["environment"]))
    values = _CASES["bases"].get(base, {}) | case.get("file", {})
    kept = {key: value for key, value in values.items() if value is not None}
    file.write_text(case.get("text", yaml.safe_dump(kept, sort_keys=False)))
    if "defaults" in case:
        (tmp_path / "defaults.yaml").write_text(yaml.safe_dump(case["defaults"]))
    with pytest.raises(ConfigurationError) as error:
        _LOADERS.get(base, lambda conf: load_stream("s", conf))(tmp_path)
    message = str(error.value)
    assert message.replace(f"{file}: ", "").replace(f"{tmp_path}/", "") == case["message"]
    assert str(tmp_path) in message and error.value.exit_code == 2
    assert all(line.count(", found ") <= 1 for line in message.splitlines())
