"""A rack of pretend nodes for learning and rehearsing multi-node PyTorch."""

__version__ = "0.1.0"
