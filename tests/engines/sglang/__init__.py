"""hicache in a real SGLang: `make engines-sglang`."""
