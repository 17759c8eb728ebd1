"""The parts of ``check_plugin``."""
