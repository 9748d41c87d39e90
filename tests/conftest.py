"""What all tests share: nothing of the user's environment reaches them."""

from __future__ import annotations

import os

for name in ("ANABRANCH_CONF", "ANABRANCH_KAFKA", "ANABRANCH_S3", "ANABRANCH_CATALOG", "ANABRANCH_WAREHOUSE"):
    os.environ.pop(name, None)
