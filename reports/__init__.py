"""Judging: reads run directories only, sends nothing."""
