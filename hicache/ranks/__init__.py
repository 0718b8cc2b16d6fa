"""The ranks of one replica: a leader whose directory decides, and workers that do its jobs in processes of their own."""
