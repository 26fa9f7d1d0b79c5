"""A Spark query's requests to the NSQ cluster."""
