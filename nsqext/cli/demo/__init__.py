"""The demo: publish and consume a day of flights, and check that every message is received once, intact."""
