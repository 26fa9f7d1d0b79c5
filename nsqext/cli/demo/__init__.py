"""The demo: publish and consume a day of flights, and check that each message is received once, unchanged."""
