"""Studies on real engines in one process: what position-independent reuse saves, and what it changes."""
