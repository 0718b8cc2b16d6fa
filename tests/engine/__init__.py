"""Tests of the engine side: copies, pools and the executor."""
