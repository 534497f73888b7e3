"""Answers of an attached model: averaged over routing, or generated as text."""

from typing import Literal

Averaging = Literal["router", "answer", "full", "orders", "orders+routing"]
"""What answers are averaged over (vmoer.inference.averaging)."""
OF_TOKENS = ("router", "answer", "full")
ORDERS = ("orders", "orders+routing")
