"""Kernel families for sequence mixers. Depends on torch only; imports no backend until asked."""
