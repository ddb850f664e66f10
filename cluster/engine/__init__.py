"""vLLM glue: KV connector, planned engine, KV layouts, turn probe."""
