"""Columns from the schema registry: a subject's schema as columns, and how a table takes its
changes up.

`avro_columns` and `json_schema_columns` read a schema, `plan` decides the columns of a stream from
its table, its subject and its file. The table's columns are those that both layers read by; a
subject only adds to them.
"""
