"""docs/tutorial.md: its files are valid. tests/integration/test_tutorial_run.py runs it."""

import json
import shutil
from pathlib import Path

import tutorial_page

from anabranch.config import load_stream

ROOT = Path(__file__).resolve().parents[3]


def test_the_stream_of_your_own_is_valid_and_its_records_have_its_columns(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "conf" / "streams" / "orders.yaml").write_text(tutorial_page.block("yaml"))
    stream = load_stream("orders", tmp_path / "conf")
    for line in tutorial_page.block("json").splitlines():
        assert json.loads(line).keys() == {column.name for column in stream.columns}
