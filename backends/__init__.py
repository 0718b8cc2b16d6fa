"""What the daemon can store objects into: one module per backend, one contract for all."""
