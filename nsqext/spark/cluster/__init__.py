"""What a Spark query asks the NSQ cluster."""
