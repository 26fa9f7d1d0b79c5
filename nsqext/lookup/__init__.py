"""Find the leaders of partitions: ask the lookup service, merge its responses, keep them fresh."""
