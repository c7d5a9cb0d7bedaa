"""Judging decode tables: how fast both backends decode with exactly so many streams, prefill excluded."""
