"""Reports about a stream: status, hours, history, explanations, differences, metrics."""
