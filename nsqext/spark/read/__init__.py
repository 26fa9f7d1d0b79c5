"""Read topics into Spark, batch and streaming."""
