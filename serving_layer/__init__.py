"""What analysts and programs read: queries, the reader, views, changes, egress, and the difference
of the layers."""
