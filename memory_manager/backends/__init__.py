"""Where the memory comes from: one interface, several kinds (`base.Backend`)."""
