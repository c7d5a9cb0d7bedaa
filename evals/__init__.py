"""Accuracy and output parity: records answers, judges nothing."""
