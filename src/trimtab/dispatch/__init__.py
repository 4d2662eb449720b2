"""Dispatch and combine of one expert group: the plan, the autograd pair, the handshake, and one file a transport."""

LAYER_FILE = "<trimtab layer>"
"""A stack frame of this file bears the name of the layer whose exchange runs."""
