"""Sending and measuring: a plan goes in, lanes play it over the wire, a run directory comes out."""
