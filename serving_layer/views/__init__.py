"""Views that a stream declares, read from stored partials and from the rows of hours without
partials."""
