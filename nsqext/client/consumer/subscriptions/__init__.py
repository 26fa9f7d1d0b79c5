"""Subscribe to the partitions of a topic and keep them subscribed."""
