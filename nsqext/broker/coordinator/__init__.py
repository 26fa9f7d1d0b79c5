"""The coordinator of a redesigned cluster: placement, leaders and in-sync replicas of partitions."""
