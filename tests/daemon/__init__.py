"""Tests of hicached."""
