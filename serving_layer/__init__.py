"""Reading and delivery for analysts and programs: queries, the reader, views, changes, egress, and
the difference between the layers."""
