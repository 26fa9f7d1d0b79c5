"""Who holds which partition: placement, leaders, in-sync replicas, and what lookup may tell about them."""
