"""Faults that a proxy in front of any OpenAI-compatible server injects: the proof that parity checks can fail."""

from evals.faults.front import Store, proxy
from evals.faults.registry import FAULTS, ProxyFault, parse

__all__ = ["FAULTS", "ProxyFault", "Store", "parse", "proxy"]
