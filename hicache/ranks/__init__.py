"""The ranks of one replica: a leader whose directory decides, and workers in processes of their own."""
