"""The Tilewright service. Importing this package starts nothing: no device, no thread, no socket."""

__all__ = ["__version__"]

__version__ = "0.1.0"
