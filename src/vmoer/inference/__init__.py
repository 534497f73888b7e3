"""Answers of an attached model: averaged over routing, or generated as text."""
