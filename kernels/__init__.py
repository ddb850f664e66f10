"""Content-defined chunking, rotary turns and paged-KV scatter: pure maths, no Ray, no vLLM."""
