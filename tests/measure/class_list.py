"""The classes that both jobs load, for `anabranch jars --archive`: `make class-list` writes
conf/jvm/classes.gz.

To be run when conf/jvm/ivy.xml or pyspark changed. Real Kafka, S3 and Spark; a thousand records.
"""

from __future__ import annotations

import gzip
import os

from commands import started
from thousand_records import run_java, thousand_records

from anabranch.spark.jars import jvm_folder


def main() -> None:
    with thousand_records() as (one, folder):
        # A folder of its own keeps a job from an archive.
        os.environ["SPARK_CONF_DIR"] = str(folder / "spark-conf")
        lines: dict[str, None] = {}
        for arguments in (("batch", one.name), ("speed", one.name, "--available-now")):
            file = folder / f"{arguments[0]}.classes"
            run_java(one, f"-XX:DumpLoadedClassList={file}")
            with started(one, *arguments) as command:
                code = command.wait()
                assert code == 0, command.log
            lines |= dict.fromkeys(file.read_text(encoding="utf-8").splitlines())
    packed = jvm_folder() / "classes.gz"
    packed.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    print(f"wrote {packed}: {len(lines):,} lines")


if __name__ == "__main__":
    main()
