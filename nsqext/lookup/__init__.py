"""Which node leads which partition of a topic: asking the lookup service, merging its answers, keeping them fresh."""
