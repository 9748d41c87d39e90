"""A pytest plugin: the clock of the tests' process begins at OTHER_DATE and goes on from there. So no test depends on the
date of its run: `OTHER_DATE=2028-02-29T23:30 PYTHONPATH=tests/support python -m pytest -p other_date tests/unit`.

libfaketime cannot: CPython's waits fail under it with `OSError: [Errno 22]`.
"""

import os
from datetime import UTC, datetime

import time_machine

time_machine.travel(
    datetime.fromisoformat(os.environ["OTHER_DATE"]).replace(tzinfo=UTC), tick=True
).start()
