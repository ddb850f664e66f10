"""A cluster in one process: replicas with block caches, rules of eviction and routers, on traces of any length."""
