"""Commands of the original nsqd."""
