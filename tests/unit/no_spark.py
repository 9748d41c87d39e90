"""The session of a job that must not start Spark."""

from pyspark.sql import SparkSession

from anabranch.spark.session import LazySpark


def _refuse() -> SparkSession:
    raise AssertionError("expected no use of Spark")


NO_SPARK = LazySpark(_refuse)
