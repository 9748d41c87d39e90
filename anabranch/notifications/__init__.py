"""Notifications about hours to other systems: webhooks and OpenLineage events."""
