"""Find the leaders of partitions: query the lookup service, merge its responses."""
