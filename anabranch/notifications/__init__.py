"""Notifications about hours to other systems: OpenLineage events."""
