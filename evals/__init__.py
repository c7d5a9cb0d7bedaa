"""Accuracy and output parity: records answers, judges nothing. (No verb yet: see CHANGELOG, "Not there yet".)"""
