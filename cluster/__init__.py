"""Everything that touches Ray, vLLM, HTTP or files."""
