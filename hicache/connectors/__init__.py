<<<<<<< HEAD
"""What lets engines as released run on hicache: one module for each place where an engine takes a connector."""
=======
"""hicache in engines as released: the modules here import their engine, and nothing in hicache imports them."""
>>>>>>> vt
