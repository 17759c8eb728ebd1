"""Operands of a call: recognised, described and placed; requests and batches made from them."""
