"""HTTP routes of the redesigned nsqd."""
