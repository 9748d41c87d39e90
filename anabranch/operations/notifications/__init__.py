"""What other systems are told of hours: webhooks and OpenLineage events."""
