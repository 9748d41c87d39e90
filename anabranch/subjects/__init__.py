"""Columns from the schema registry: a subject's schema as columns, and how a table takes up its
changes.

`avro_columns` and `json_schema_columns` read a schema. `plan` decides a stream's columns from its
table, its subject and its file. Both layers read by the table's columns; a subject only adds to
them.
"""
