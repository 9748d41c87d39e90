"""Another program that maintains a stream's tables with Iceberg's Spark procedures, as a platform
does.

    python -m soak.platform CONF STREAM OPERATION...

Each operation runs on each table of the stream. A failed one, such as after a conflicting commit of
a job, is skipped; the last line of the output has the number of successful calls.
"""

import logging
import os
import sys
from datetime import UTC, datetime, timedelta

from pyspark.sql import SparkSession

from anabranch.config import load_environment, load_stream
from anabranch.spark.jars import JOBS, ensure_jars, jvm_folder
from anabranch.spark.settings import session_settings

LOG = logging.getLogger("platform")

OPERATIONS = ("rewrite_data_files", "rewrite_manifests", "expire_snapshots", "remove_orphan_files")


def call(operation: str, now: datetime) -> str:
    """Return the arguments of a procedure after the table. Pure."""
    day_ago = f"older_than => TIMESTAMP '{now - timedelta(days=1, minutes=1):%Y-%m-%d %H:%M:%S}'"
    return {
        "rewrite_data_files": "options => map('rewrite-all', 'true')",
        "rewrite_manifests": "use_caching => false",
        # All snapshots without a branch or tag.
        "expire_snapshots": f"older_than => TIMESTAMP '{now:%Y-%m-%d %H:%M:%S}', retain_last => 1",
        "remove_orphan_files": f"{day_ago}, prefix_listing => true",
    }[operation]


def main(conf: str, name: str, *operations: str) -> int:
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    environment, stream = load_environment(conf), load_stream(name, conf)
    log4j = f"-Dlog4j2.configurationFile=file:{jvm_folder() / 'log4j2-spark.properties'}"
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    settings = session_settings(environment) | {
        "spark.driver.extraClassPath": ":".join(str(jar) for jar in ensure_jars(confs=JOBS).spark),
        "spark.driver.extraJavaOptions": f"{log4j} -Daws.requestChecksumCalculation=WHEN_REQUIRED",
        "spark.jars": "",
        "spark.sql.session.timeZone": "UTC",
    }
    builder = SparkSession.builder.master("local[1]").appName("platform")
    spark = builder.config(map=settings).getOrCreate()
    catalog, done = environment.catalog.name, 0
    tables = (stream.table, stream.dead_letters_table, stream.hours_table)
    for operation in operations:
        for table in tables:
            arguments = f"table => '{table}', {call(operation, datetime.now(UTC))}"
            try:
                rows = spark.sql(f"CALL {catalog}.system.{operation}({arguments})").collect()
                LOG.info("%s of %s: %d rows, first %s", operation, table, len(rows), rows[:1])
                done += 1
            except Exception as error:
                LOG.info("%s of %s failed: %s", operation, table, str(error).splitlines()[0][:300])
    spark.stop()
    print(f"{done} of {len(operations) * len(tables)} calls succeeded")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
