"""hicache in a real vLLM: `make engines-vllm`."""
