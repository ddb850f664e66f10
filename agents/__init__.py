"""Who is calling and what its cache holds: anchors, fingerprints, sessions."""
