"""Multi-agent programs: who speaks, with which anchor, after whom."""
