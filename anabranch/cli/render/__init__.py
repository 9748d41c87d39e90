"""Print reports, as text or JSON."""
