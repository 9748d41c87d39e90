"""Views that a stream declares, read from their partials and the rows that have none yet."""
