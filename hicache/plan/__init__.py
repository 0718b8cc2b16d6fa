"""`hicache plan`: what a model needs on a machine, worked out before anything is deployed. Pure Python."""
