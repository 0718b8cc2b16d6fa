"""hicached: the process of a node that owns the stored tier."""
