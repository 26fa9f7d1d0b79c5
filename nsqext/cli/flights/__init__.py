"""The demo: a day of flights through a cluster, and an account of what arrived."""
