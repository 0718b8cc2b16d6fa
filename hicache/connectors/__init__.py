"""What lets engines as released run on hicache: one module for each place where an engine takes a connector."""
