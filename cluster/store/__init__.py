"""The content-addressed chunk store of a node."""
