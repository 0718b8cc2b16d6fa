"""A whole node in one thread: real engines and a real hicached, driven by a seeded scheduler on a virtual clock."""
