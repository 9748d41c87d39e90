"""What people and programs read of a stream: status, hours, history, explanations, differences, metrics."""
