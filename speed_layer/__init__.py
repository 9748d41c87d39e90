"""The fast arm: a Structured Streaming job that publishes each micro-batch within seconds."""
