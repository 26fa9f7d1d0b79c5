"""Find the leaders of partitions: query the lookup service, merge and refresh its responses."""
