"""Spark's settings, sessions and jars, and the spark-submit commands of the jobs."""
