"""The quality gate: expectations, row counts, and the pages that show them."""
