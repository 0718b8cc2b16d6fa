"""hicache: a hierarchical KV-cache storage service for LLM inference."""
