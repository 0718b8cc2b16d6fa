"""hicache in engines as released: the modules here import their engine, and nothing in hicache imports them."""
